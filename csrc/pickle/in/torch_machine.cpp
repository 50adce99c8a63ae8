#include "pickle/in/torch_machine.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "pickle/common/object.h"

namespace ptsave {
namespace {

Object to_bytes(std::string_view bytes) {
  return Object::checked(
      PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
}

struct RebuildFunction {
  const char* module;
  const char* name;
  Rebuild kind;
};

constexpr std::array kRebuildFunctions = {
    RebuildFunction{"torch._utils", "_rebuild_tensor_v2", Rebuild::kTensorV2},
    RebuildFunction{"torch._utils", "_rebuild_tensor_v3", Rebuild::kTensorV3},
    RebuildFunction{"torch._utils", "_rebuild_tensor", Rebuild::kTensor},
    RebuildFunction{"torch._utils", "_rebuild_parameter", Rebuild::kParameter},
    RebuildFunction{"torch._utils", "_rebuild_qtensor", Rebuild::kQuantized},
    RebuildFunction{"torch._tensor", "_rebuild_from_type_v2", Rebuild::kFromType},
};

// Whether the rebuild functions, and the functions that they call, are torch's own, not replaced.
bool internals_are_torchs() {
  const Object utils = import_module("torch._utils");
  for (const char* name : {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
                           "_rebuild_parameter", "_restore_device_fake_mode"}) {
    if (!is_function_of(attribute(utils, name).get(), utils)) return false;
  }
  const Object module = import_module("torch.nn.parameter");
  const Object parameter = attribute(module, "Parameter");
  return attribute(import_module("torch.nn"), "Parameter").get() == parameter.get() &&
         is_function_of(attribute(parameter, "__new__").get(), module);
}

}  // namespace

TorchMachine::TorchMachine(PyObject* persistent_load, PyObject* encoding, PyObject* unpickler_type,
                           CollectorPause& pause)
    : persistent_load_(persistent_load),
      encoding_(encoding),
      pause_(pause),
      unpickler_type_(unpickler_type != nullptr
                          ? Object::borrow(unpickler_type)
                          : attribute(import_module("torch._weights_only_unpickler"), "Unpickler")),
      bytes_io_(attribute(import_module("io"), "BytesIO")) {}

Object TorchMachine::run(std::string_view program, std::initializer_list<PyObject*> memo) const {
  const Object dict = Object::checked(PyDict_New());
  long i = 0;
  for (PyObject* value : memo) {
    const Object key = Object::checked(PyLong_FromLong(i++));
    checked(PyDict_SetItem(dict.get(), key.get(), value));
  }
  return run(program, dict);
}

Object TorchMachine::run(std::string_view program, const Object& memo) const {
  const CollectorResumed resumed(pause_);
  const Object bytes = to_bytes(program);
  const Object file = Object::checked(PyObject_CallOneArg(bytes_io_.get(), bytes.get()));
  const Object arguments = Object::checked(PyTuple_Pack(1, file.get()));
  const Object keywords = Object::checked(Py_BuildValue("{sO}", "encoding", encoding_));
  const Object unpickler =
      Object::checked(PyObject_Call(unpickler_type_.get(), arguments.get(), keywords.get()));
  checked(PyObject_SetAttrString(unpickler.get(), "memo", memo.get()));
  checked(PyObject_SetAttrString(unpickler.get(), "persistent_load", persistent_load_));
  return call_method(unpickler.get(), "load");
}

Object TorchMachine::load_persistent(PyObject* id) const {
  const CollectorResumed resumed(pause_);
  return Object::checked(PyObject_CallOneArg(persistent_load_, id));
}

Object TorchMachine::call(PyObject* callable, PyObject* arguments) const {
  const CollectorResumed resumed(pause_);
  return Object::checked(PyObject_Call(callable, arguments, nullptr));
}

Object Globals::resolve(std::string_view lines) {
  const auto found = resolved_.find(lines);
  if (found != resolved_.end()) return found->second;
  Object object = torch_.run(std::string("c").append(lines).append("."));
  resolved_.emplace(lines, object);
  note_default(object.get());
  if (PyFunction_Check(object.get())) note_function(object.get());
  return object;
}

void Globals::note_default(PyObject* object) {
  const Object module = import_module("torch._weights_only_unpickler");
  const Object allowed = call_method(module.get(), "_get_allowed_globals");
  if (!PyDict_Check(allowed.get())) return;
  PyObject* value = nullptr;
  for (Py_ssize_t i = 0; PyDict_Next(allowed.get(), &i, nullptr, &value) != 0;) {
    if (value == object) return defaults_.push_back(object);
  }
}

void Globals::note_function(PyObject* function) {
  for (const auto& [module, name, kind] : kRebuildFunctions) {
    if (attribute(import_module(module), name).get() != function) continue;
    if (rebuilds_.empty()) rebuilds_are_torchs_ = internals_are_torchs();
    rebuilds_.emplace_back(function, kind);
    if (kind == Rebuild::kTensorV2) tensor_v2_ = function;
    return;
  }
}

bool Globals::is_default(PyObject* object) const {
  return std::ranges::find(defaults_, object) != defaults_.end();
}

Rebuild Globals::rebuild_of(PyObject* function) const {
  for (const auto& [known, kind] : rebuilds_) {
    if (known == function) return kind;
  }
  return Rebuild::kNone;
}

}  // namespace ptsave
