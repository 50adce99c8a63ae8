// The storages of one archive while it is loaded: which record each has, on which device, whether
// somebody else keeps it, and the copies that are planned from them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/read/data_records.h"
#include "core/read/reader.h"
#include "storage/restore.h"

namespace ptsave {

// Either start() has the bytes read in the background, or reserve() gives storages their places and
// fill() reads them.  Both forget the storages made before.  One thread at a time.
class ArchiveStorages {
 public:
  // Waits for the payload of a record that is being read.
  using Wait = std::function<void(std::size_t record)>;

  // `reader` must outlive it.
  ArchiveStorages(ArchiveReader& reader, Wait wait);
  ArchiveStorages(const ArchiveStorages&) = delete;
  ArchiveStorages& operator=(const ArchiveStorages&) = delete;

  const DataRecords& records() const { return records_; }

  // Begins to read `records`.  FormatError, IoError.
  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets);
  void reserve();

  // Storages saved at `location` go to the CPU, or, after reserve(), to an accelerator.  Only for
  // such locations storages are handed to the unpickler.
  void place(const std::string& location, c10::Device device);
  // For the unpickler: see StorageSource::storage_of().
  const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                 std::string_view location);
  // The storage of a record on the CPU, possibly still being filled.  An empty one is new each
  // time, as torch makes one for each reference.
  const c10::Storage& storage(std::size_t record);
  // The storage on a device that gets the bytes of a record that is not empty.
  const c10::Storage& storage_on(std::size_t record, c10::Device device);
  // Where the storage was saved that storage_of() has handed out for a record; null if it has not.
  const std::string* location_of(std::size_t record) const;
  // The record whose reserved storage a tensor has.
  std::optional<std::size_t> record_of(const at::Tensor& tensor) const;
  // The records to whose storages anything but this object refers; it lets go of all others.
  std::vector<std::size_t> referenced();
  // Ends the load: storages handed out become resizable, as any other.
  void release();

  // These need reserve(): std::logic_error without.  See Restore.
  void plan_copy(const at::Tensor& target, const at::Tensor& source);
  std::vector<DamagedRecord> fill(std::span<const std::size_t> records,
                                  const Restore::Options& options, const Poll& poll);
  bool is_filled(std::size_t record) const { return restore().is_filled(record); }
  std::vector<std::size_t> changed() const { return restore().changed(); }

 private:
  struct Place {
    std::string location;
    c10::Device device;
  };
  static constexpr std::uint32_t kNoPlace = ~std::uint32_t{0};

  std::size_t n_records() const { return reader_.index().records().size(); }
  Restore& restore();
  const Restore& restore() const;
  void forget();

  ArchiveReader& reader_;
  Wait wait_;
  DataRecords records_;
  std::vector<c10::Storage> storages_;  // by record; none where it was not asked for
  std::vector<c10::Storage> empty_storages_;
  std::vector<Place> places_;
  std::vector<std::uint32_t> locations_;     // by record: into places_, or kNoPlace
  std::vector<c10::Storage> placed_;         // by record: on accelerators
  std::vector<std::size_t> placed_records_;  // in the order in which they were
  std::size_t n_planned_ = 0;                // of these, whose bytes are to be copied there
  bool is_reading_ = false;
  std::optional<Restore> restore_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> record_by_storage_;
};

}  // namespace ptsave
