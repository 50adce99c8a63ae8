#include "storage/numbered_storages.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

namespace ptsave {
namespace {

// Dead storages are removed after this many new bytes.  A dead storage still has a few bytes of
// identity beside its freed memory, so malloc cannot join that memory with its neighbours.  If
// steps allocate and free large tensors, each step would lose as much memory again.
constexpr std::uint64_t kMaxLateNbytes = std::uint64_t{4} << 20;

// Whether two tensors share autograd's version counter. c10 has no function for that.
bool are_same_counter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof a) == 0;
}

}  // namespace

std::uint32_t NumberedStorages::number(const c10::Storage& storage, const at::Tensor* tensor,
                                       c10::ScalarType dtype) {
  const bool is_tracked = tensor != nullptr && !tensor->is_inference() && storage.nbytes() > 0;
  if (is_tracked) {
    const c10::VariableVersion& counter = tensor->unsafeGetTensorImpl()->version_counter();
    const auto found = known_.find(storage.unsafeGetStorageImpl());
    if (found != known_.end()) {
      const Known& known = found->second;
      if (are_same_counter(known.counter, counter) && known.version == counter.current_version() &&
          known.data == storage.data() && known.nbytes == storage.nbytes() &&
          known.dtype == dtype) {
        return known.number;
      }
    }
  }
  const std::size_t number = next_ + fresh_.storages.size();
  if (number >= std::numeric_limits<std::uint32_t>::max()) {
    throw std::length_error("an archive has at most 2^32 - 1 storages");
  }
  fresh_.storages.push_back(storage);
  if (is_tracked) {
    const c10::VariableVersion& counter = tensor->unsafeGetTensorImpl()->version_counter();
    tracked_.push_back({storage.getWeakStorageImpl(), counter, counter.current_version(),
                        storage.data(), storage.nbytes(), dtype,
                        static_cast<std::uint32_t>(number)});
  }
  return static_cast<std::uint32_t>(number);
}

std::uint64_t NumberedStorages::fresh_nbytes() const {
  std::uint64_t nbytes = 0;
  for (const c10::Storage& storage : fresh_.storages) nbytes += storage.nbytes();
  return nbytes;
}

void NumberedStorages::commit() {
  nbytes_since_removal_ += fresh_nbytes();
  if (known_.size() + tracked_.size() > max_known_ || nbytes_since_removal_ >= kMaxLateNbytes) {
    remove_dead();
  }
  for (Known& known : tracked_) {
    const c10::StorageImpl* const key = known.storage._unsafe_get_target();
    known_.insert_or_assign(key, std::move(known));
  }
  next_ += static_cast<std::uint32_t>(fresh_.storages.size());
  rollback();
}

void NumberedStorages::rollback() {
  tracked_.clear();
  fresh_.storages.clear();
}

// Removes storages that are dead except for their identity.
void NumberedStorages::remove_dead() {
  nbytes_since_removal_ = 0;
  std::erase_if(known_, [](const auto& item) { return item.second.storage.use_count() == 0; });
  constexpr std::size_t kMinKnown = 1024;
  max_known_ = std::max(2 * (known_.size() + tracked_.size()), kMinKnown);
}

}  // namespace ptsave
