// The storages of one archive during its load: records, devices, references and planned copies.
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

#include "core/read/reader.h"
#include "tensors/restore.h"

namespace ptsave {

// Either start() reads in the background, or reserve() gives storages places and fill() reads.
// Both start() and reserve() forget earlier storages.  Not safe for concurrent use.
class ArchiveStorages {
 public:
  // Waits for the payload of a record that is being read.
  using Wait = std::function<void(std::size_t record)>;

  // `reader` must outlive it.
  ArchiveStorages(ArchiveReader& reader, Wait wait);
  ArchiveStorages(const ArchiveStorages&) = delete;
  ArchiveStorages& operator=(const ArchiveStorages&) = delete;

  const DataRecords& records() const { return records_; }

  // Begins to read `records`.  Throws FormatError, IoError.
  void start(const std::vector<std::size_t>& records, std::size_t n_threads, bool verify,
             bool exact_offsets);
  void reserve();

  // Loads storages saved at `location` to the CPU or, after reserve(), to an accelerator.  The
  // unpickler only gets storages of such locations.
  void place(const std::string& location, c10::Device device);
  // For the unpickler: see StorageSource::storage_of().
  const c10::Storage* storage_of(std::string_view key, std::uint64_t nbytes,
                                 std::string_view location);
  // The storage of a record on the CPU, which may still be filling.  An empty one is new each time,
  // because torch makes one for each reference.
  const c10::Storage& storage(std::size_t record);
  // The storage on a device for the bytes of a record, which is not empty.
  const c10::Storage& storage_on(std::size_t record, c10::Device device);
  // The location of the storage that storage_of() has returned for a record, or null.
  const std::string* location_of(std::size_t record) const;
  // The record whose reserved storage a tensor uses.
  std::optional<std::size_t> record_of(const at::Tensor& tensor) const;
  // The records whose storages have references outside this object.  Frees all other storages.
  std::vector<std::size_t> referenced();
  // Ends the load: its storages become resizable, like any other.
  void release();

  // See Restore; without reserve() these throw std::logic_error.
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
  std::vector<c10::Storage> storages_;  // by record; undefined if not needed yet
  std::vector<c10::Storage> empty_storages_;
  std::vector<Place> places_;
  std::vector<std::uint32_t> locations_;     // by record: into places_, or kNoPlace
  std::vector<c10::Storage> placed_;         // by record: on accelerators
  std::vector<std::size_t> placed_records_;  // in the order of placement
  std::size_t n_planned_ = 0;                // placed records with a planned copy
  bool is_reading_ = false;
  std::optional<Restore> restore_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> record_by_storage_;
};

}  // namespace ptsave
