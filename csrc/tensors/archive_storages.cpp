#include "tensors/archive_storages.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "device/side_streams.h"
#include "tensors/storage.h"

namespace ptsave {

ArchiveStorages::ArchiveStorages(ArchiveReader& reader, Wait wait)
    : reader_(reader), wait_(std::move(wait)), records_(reader.index()) {}

void ArchiveStorages::start(const std::vector<std::size_t>& records, std::size_t n_threads,
                            bool verify, bool exact_offsets) {
  forget();
  reader_.start(records, n_threads, verify, exact_offsets);
  is_reading_ = true;
}

void ArchiveStorages::reserve() {
  restore_.reset();
  forget();
  reader_.reserve(records_.storages());
  is_reading_ = false;
  restore_.emplace(reader_, [this](std::size_t record) { return storage(record); });
}

void ArchiveStorages::place(const std::string& location, c10::Device device) {
  const auto place = std::ranges::find(places_, location, &Place::location);
  if (place == places_.end()) {
    places_.push_back({location, device});
  } else {
    place->device = device;
  }
}

const c10::Storage* ArchiveStorages::storage_of(std::string_view key, std::uint64_t nbytes,
                                                std::string_view location) {
  const auto place = std::ranges::find(places_, location, &Place::location);
  if (place == places_.end()) return nullptr;
  const std::size_t i = records_.find(key);
  if (i == ArchiveIndex::kNotFound || reader_.index().records()[i].nbytes != nbytes) {
    return nullptr;
  }
  // An empty storage has no bytes to copy, and its location is never needed.
  if (nbytes == 0) return place->device.is_cpu() ? &storage(i) : nullptr;
  locations_.resize(n_records(), kNoPlace);
  if (locations_[i] == kNoPlace) {
    locations_[i] = static_cast<std::uint32_t>(place - places_.begin());
  }
  return place->device.is_cpu() ? &storage(i) : &storage_on(i, place->device);
}

const c10::Storage& ArchiveStorages::storage(std::size_t record) {
  if (record < storages_.size() && storages_[record]) return storages_[record];
  LoadedPayload payload = reader_.payload(record);
  if (must_copy(payload) && is_reading_) wait_(record);
  const std::uint64_t nbytes = payload.nbytes;
  c10::Storage storage = make_storage(std::move(payload));
  if (nbytes == 0) return empty_storages_.emplace_back(std::move(storage));
  // A freed storage may have had the same address.
  if (restore_) record_by_storage_.insert_or_assign(storage.unsafeGetStorageImpl(), record);
  storages_.resize(n_records());
  return storages_[record] = std::move(storage);
}

// Not resizable before release(), so that a shape larger than the storage is an error.
const c10::Storage& ArchiveStorages::storage_on(std::size_t record, c10::Device device) {
  placed_.resize(n_records());
  if (!placed_[record]) {
    if (placed_records_.empty()) SideStreams::refuse_capture(device);  // allocating would spoil it
    placed_[record] = empty_storage(reader_.index().records()[record].nbytes, device);
    placed_records_.push_back(record);
  }
  return placed_[record];
}

const std::string* ArchiveStorages::location_of(std::size_t record) const {
  const bool known = record < locations_.size() && locations_[record] != kNoPlace;
  return known ? &places_[locations_[record]].location : nullptr;
}

std::optional<std::size_t> ArchiveStorages::record_of(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return std::nullopt;
  const auto found = record_by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  return found == record_by_storage_.end() ? std::nullopt : std::optional(found->second);
}

// Releases each storage and tries to lock it again.  A count of references would not do: a storage
// keeps its Python object, and that keeps the storage.
std::vector<std::size_t> ArchiveStorages::referenced() {
  std::vector<std::size_t> records;
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    if (!storages_[i]) continue;
    const c10::weak_intrusive_ptr<c10::StorageImpl> weak = storages_[i].getWeakStorageImpl();
    record_by_storage_.erase(storages_[i].unsafeGetStorageImpl());
    storages_[i] = c10::Storage();
    if (auto found = weak.lock()) {
      record_by_storage_.emplace(found.get(), i);
      storages_[i] = c10::Storage(std::move(found));
      records.push_back(i);
    }
  }
  return records;
}

void ArchiveStorages::release() {
  for (std::vector<c10::Storage>* const storages : {&storages_, &empty_storages_, &placed_}) {
    for (c10::Storage& storage : *storages) {
      // Free the storage at once, while it is in the cache.
      if (const c10::Storage last = std::move(storage)) {
        last.unsafeGetStorageImpl()->set_resizable(true);
      }
    }
    storages->clear();
  }
  placed_records_.clear();
  n_planned_ = 0;
}

void ArchiveStorages::plan_copy(const at::Tensor& target, const at::Tensor& source) {
  restore().add(target, source, record_of(source));
}

std::vector<DamagedRecord> ArchiveStorages::fill(std::span<const std::size_t> records,
                                                 const Restore::Options& options,
                                                 const Poll& poll) {
  for (; n_planned_ < placed_records_.size(); ++n_planned_) {
    const std::size_t record = placed_records_[n_planned_];
    restore().add(placed_[record], record);
  }
  return restore().run(records, options, poll);
}

Restore& ArchiveStorages::restore() {
  if (!restore_) throw std::logic_error("reserve() comes first");
  return *restore_;
}

const Restore& ArchiveStorages::restore() const {
  return const_cast<ArchiveStorages*>(this)->restore();
}

void ArchiveStorages::forget() {
  for (std::vector<c10::Storage>* const storages : {&storages_, &empty_storages_, &placed_}) {
    storages->clear();
  }
  placed_records_.clear();
  n_planned_ = 0;
  places_.clear();
  locations_.clear();
}

}  // namespace ptsave
