// Frees the blocks of replaced and removed files in the background.
//
// A file system frees them when the last one lets go of the file.  That is inside renameat() and
// unlinkat(), for 0.12 s per GB on ext4, unless somebody holds the file open across the call: then
// it is inside that one's close(), for which no saver has to wait.
#pragma once

#include <string>

#include "core/io/file.h"

namespace ptsave {

// Holds the blocks of the file `name` in `directory`, which is about to be replaced or removed.
// Empty where they are better freed at once: of small files, of files with other names, where the
// disk might need their room for the next save, and on file systems that are not known to free
// them at the last close (NFS renames an open file instead).
Descriptor hold_blocks(int directory, const std::string& name);

// Lets go of a held file without waiting for its blocks.  At once, and waiting, if several are
// being freed already or no thread can start.
void release_later(Descriptor held) noexcept;

// Waits until the blocks of all released files are free.  Forks, the end of the process and whoever
// finds the disk full do so.
void finish_releases() noexcept;

}  // namespace ptsave
