#include "core/write/file_plan.h"

#include "core/base/error.h"

namespace ptsave {

void FilePlan::write_file(const Replacement& target, const WriteOptions& options,
                          const Poll& poll) {
  run(options, [&](const WriteOptions& write) {
    AtomicFile replacement(target.path, target.display);
    File& file = replacement.file();
    write_to(file, write, poll);
    try {
      replacement.commit(target.durable);
    } catch (const IoError&) {
      if (arriving_ != nullptr) complete_ = File::duplicate(file.fd(), target.display);
      throw;
    }
  });
}

void FilePlan::write_in_place(const std::string& path, std::optional<int> scratch, bool durable,
                              const WriteOptions& options, const Poll& poll) {
  run(options, [&](const WriteOptions& write) {
    const auto write_it = [&](File& file) { write_to(file, write, poll); };
    std::optional<File> first;
    if (scratch) first = File::duplicate(*scratch, path);
    if (complete_) {
      overwrite(path, &*complete_, nbytes(), durable, [](File& /*complete*/) {}, poll);
      progress_ = nbytes();
      return;
    }
    overwrite(path, first ? &*first : nullptr, has_holes() ? 0 : nbytes(), durable, write_it, poll);
  });
}

void FilePlan::write_stream(const StreamSink& sink, const WriteOptions& options) {
  run(options, [&](const WriteOptions& write) {
    const auto body = make_body(write, write.chunk_nbytes);
    write_to_stream(*body, sink, write, progress_);
  });
}

void FilePlan::write_to(File& file, const WriteOptions& options, const Poll& poll) {
  if (!has_holes()) file.preallocate(nbytes());
  const auto body = make_body(options, direct_chunk_nbytes(file, options));
  write_to_file(*body, file, 0, options, progress_, poll);
}

}  // namespace ptsave
