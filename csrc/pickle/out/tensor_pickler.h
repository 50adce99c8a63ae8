// Pickles tensors, parameters and storages.
//
// Lives for one save.  Not thread-safe; needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "pickle/common/object.h"
#include "pickle/out/pickle_environment.h"
#include "pickle/out/pickle_stream.h"
#include "pickle/out/pickler.h"

namespace ptsave {

class TensorPickler {
 public:
  // `numbering` may be empty, and must outlive this object.
  TensorPickler(const PickleEnvironment& environment, PickleStream& stream,
                const StorageNumbering& numbering)
      : environment_(environment), stream_(stream), out_(stream.out()), numbering_(numbering) {}

  static bool is_tensor(PyTypeObject* type);
  static bool is_parameter(PyTypeObject* type);
  bool is_storage(PyTypeObject* type) const;

  // Write an object of exactly this type.  Tensors and parameters must be new to the stream;
  // storages are always written again.  Throw HandOver for an object that is not ordinary.
  void tensor(PyObject* object, Reach reach);
  void parameter(PyObject* object, Reach reach);
  void storage(PyObject* object);

  // The storages in the order of their keys.  Throws HandOver if torch refuses them.
  std::vector<c10::Storage> take_storages();

 private:
  struct StoredDtype {
    Recurring dtype;
    std::optional<Recurring> storage_class;  // if tensors of this dtype have typed storages
  };
  // The key of a storage that may be referred to again.
  struct StorageKey {
    std::uint32_t number;   // the key's number in the memo
    c10::ScalarType dtype;  // the first reference's
  };
  struct Location {
    c10::Device device;
    Recurring text;
    bool is_constant;  // else torch makes a new str each time
  };

  void check_plain(PyObject* object, const at::Tensor& tensor) const;
  void reduced_tensor(PyObject* object, const at::Tensor& tensor, bool requires_grad);
  void reduced_meta_tensor(const at::Tensor& tensor, bool requires_grad);
  void integers(c10::IntArrayRef values);
  void hooks();
  void metadata(PyObject* object);
  void function(std::optional<Recurring>& function, const char* name);
  StoredDtype& stored_dtype(c10::ScalarType dtype);

  void untyped_storage(const c10::Storage& storage);
  void reference(const c10::Storage& storage, Recurring& storage_class, c10::ScalarType dtype);
  void key(const c10::Storage& storage, c10::ScalarType dtype);
  std::uint32_t number(const c10::Storage& storage, c10::ScalarType dtype);
  std::uint32_t key_text(std::uint32_t number);
  void note_dtype(const c10::Storage& storage, c10::ScalarType dtype);
  void check_dtypes() const;
  void location(const c10::Storage& storage);
  Location& location_of(const c10::Storage& storage);

  const PickleEnvironment& environment_;
  PickleStream& stream_;
  PickleWriter& out_;
  const StorageNumbering& numbering_;
  const at::Tensor* tensor_ = nullptr;  // the tensor whose storage is being written

  std::vector<c10::Storage> storages_;
  std::vector<c10::ScalarType> storage_dtypes_;  // of storages_
  bool has_several_dtypes_ = false;
  std::vector<StorageKey> keys_;
  AddressTable keys_by_storage_;  // StorageImpl -> index into keys_
  std::vector<Location> locations_;
  std::array<std::optional<StoredDtype>, c10::NumScalarTypes> dtypes_;
  std::optional<Recurring> rebuild_tensor_v2_;
  std::optional<Recurring> rebuild_tensor_v3_;
  std::optional<Recurring> rebuild_meta_tensor_;
  std::optional<Recurring> rebuild_parameter_;
  std::optional<Recurring> untyped_storage_class_;
  Recurring word_storage_{Object::borrow(environment_.word_storage())};
};

}  // namespace ptsave
