// Follows CPython's Modules/_pickle.c step by step, because its choices decide the bytes.  Examples
// are the moment at which an object is memoised, the batches of items (lists, dicts and iterators
// differ), and the form of a recursive tuple.  For tensors it follows torch's persistent_id and
// __reduce_ex__, down to the identity of interned strings ('storage', 'cpu', a storage's key).
// Temporary objects that Python or torch would make, and that have no other references, are only
// counted.  An object with a single reference, from its container, needs no memo entry.
#include "pickle/out/pickler.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include <cstddef>
#include <limits>
#include <string_view>

#include "pickle/out/pickle_environment.h"
#include "pickle/out/pickle_stream.h"
#include "pickle/out/tensor_pickler.h"

namespace ptsave {
namespace {

constexpr int kBatchSize = 1000;
// Deeper objects are left to Python's pickler, so that the C stack cannot overflow here.
constexpr int kMaxDepth = 400;
// Levels of the recursion limit that Python's pickler uses: for a container, and for a tensor's
// __reduce_ex__ with its deepest calls.
constexpr int kLevelsForContainer = 2;
constexpr int kLevelsForReduce = 16;

// The reach of an object in a container.  `known` is the number of references that the caller can
// explain, one of them from the container.
Reach reach_with(Py_ssize_t known, PyObject* object) {
#ifdef Py_GIL_DISABLED
  return Reach::kAgain;  // other threads' references are not visible
#else
  return Py_REFCNT(object) == known ? Reach::kOnce : Reach::kAgain;
#endif
}

// The __dict__s of a class's instances may share a table of keys, which has one reference to each
// key.
bool may_share_keys(PyObject* dict) {
  return reinterpret_cast<PyDictObject*>(dict)->ma_values != nullptr;
}

Object next_of(PyObject* iterator) {
  Object item = Object::steal(PyIter_Next(iterator));
  if (!item && PyErr_Occurred() != nullptr) throw PythonError{};
  return item;
}

// The attributes of an OrderedDict, or nothing.  Throws HandOver if pickling might use one of them.
Object instance_state(PyObject* object) {
  PyObject** const attributes = _PyObject_GetDictPtr(object);
  if (attributes == nullptr || *attributes == nullptr || PyDict_Size(*attributes) == 0) return {};
  Object state = Object::borrow(*attributes);
  if (PyDict_CheckExact(state.get()) == 0) throw HandOver{};
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  while (PyDict_Next(state.get(), &position, &name, nullptr) != 0) {
    if (PyUnicode_CheckExact(name) == 0 || PyUnicode_IS_COMPACT_ASCII(name) == 0) throw HandOver{};
    const std::string_view text(static_cast<const char*>(PyUnicode_DATA(name)),
                                static_cast<std::size_t>(PyUnicode_GET_LENGTH(name)));
    if (text.starts_with("__") || text == "items") throw HandOver{};
  }
  return state;
}

class Pickler {
 public:
  Pickler(const PickleEnvironment& environment, const StorageNumbering& numbering)
      : environment_(environment),
        stream_(environment),
        tensors_(environment, stream_, numbering),
        out_(stream_.out()) {}

  PickledObject dump(PyObject* object) {
    const RecursionLevels levels(kLevelsForReduce);
    if (levels.too_deep()) throw HandOver{};
    constexpr std::string_view kProtocol = "\x80\x02";
    out_.append(kProtocol);
    save(object);
    return {stream_.finish(), tensors_.take_storages()};
  }

 private:
  // The caller keeps the object alive.
  void save(PyObject* object, Reach reach = Reach::kAgain) {
    if (save_atom(object)) return;
    PyTypeObject* const type = Py_TYPE(object);
    if (tensors_.is_storage(type)) return tensors_.storage(object);
    if (reach == Reach::kAgain && stream_.get(object)) return;
    if (type == &PyUnicode_Type) return stream_.text(object, reach);
    if (TensorPickler::is_tensor(type)) return tensors_.tensor(object, reach);
    if (TensorPickler::is_parameter(type)) return tensors_.parameter(object, reach);
    if (save_simple(object)) return;
    save_container(object, reach);
  }

  // Writes None, bools and numbers, which are never memoised.
  bool save_atom(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    if (object == Py_None) {
      out_.opcode(opcode::kNone);
    } else if (type == &PyBool_Type) {
      out_.boolean(object == Py_True);
    } else if (type == &PyLong_Type) {
      save_int(object);
    } else if (type == &PyFloat_Type) {
      out_.real(PyFloat_AS_DOUBLE(object));
    } else {
      return false;
    }
    return true;
  }

  // Writes objects without parts: bytes, strings, dtypes, functions, types, ...
  bool save_simple(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    if (type == &PyBytes_Type) {
      save_bytes(object);
    } else if (type == &THPDtypeType) {
      stream_.reduced_to_name(object);
    } else if (type == &PyFunction_Type || type == &PyType_Type) {
      const bool is_singletons = object == reinterpret_cast<PyObject*>(Py_TYPE(Py_None)) ||
                                 object == reinterpret_cast<PyObject*>(Py_TYPE(Py_Ellipsis)) ||
                                 object == reinterpret_cast<PyObject*>(Py_TYPE(Py_NotImplemented));
      if (is_singletons) throw HandOver{};
      stream_.global(object);
    } else {
      return false;
    }
    return true;
  }

  void save_container(PyObject* object, Reach reach) {
    const RecursionLevels levels(kLevelsForContainer);
    if (depth_ == kMaxDepth || levels.too_deep()) throw HandOver{};
    ++depth_;
    PyTypeObject* const type = Py_TYPE(object);
    if (type == &PyDict_Type) {
      save_dict(object, reach);
    } else if (type == &PyList_Type) {
      save_list(object, reach);
    } else if (type == &PyTuple_Type) {
      save_tuple(object, reach);
    } else if (type == environment_.ordered_dict_type()) {
      save_ordered_dict(object);
    } else if (type == &PySet_Type || type == &PyFrozenSet_Type) {
      save_set(object);
    } else if (type == &PyComplex_Type) {
      save_complex(object);
    } else if (type == environment_.size_type() || type == &THPDeviceType) {
      save_reduced(object);
    } else {
      throw HandOver{};
    }
    --depth_;
  }

  void save_int(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) return out_.integer(value);
    const Object n_bits = call_method(object, "bit_length");
    const Py_ssize_t n = PyLong_AsSsize_t(n_bits.get()) / 8 + 1;
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    if (n > std::numeric_limits<std::int32_t>::max()) throw HandOver{};
    const Object to_bytes = attribute(object, "to_bytes");
    const Object arguments = Object::checked(Py_BuildValue("(ns)", n, "little"));
    const Object keywords = Object::checked(Py_BuildValue("{sO}", "signed", Py_True));
    const Object bytes =
        Object::checked(PyObject_Call(to_bytes.get(), arguments.get(), keywords.get()));
    std::string_view digits(PyBytes_AS_STRING(bytes.get()), static_cast<std::size_t>(n));
    // The last byte is superfluous if it only repeats a negative number's sign.
    const bool repeats_sign = digits.ends_with('\xff') && (digits[digits.size() - 2] & 0x80) != 0;
    if (overflow < 0 && repeats_sign) digits.remove_suffix(1);
    out_.long_integer(digits);
  }

  void save_bytes(PyObject* object) {
    if (PyBytes_GET_SIZE(object) == 0) {
      const Object no_arguments = Object::checked(PyTuple_New(0));
      return save_call(reinterpret_cast<PyObject*>(&PyBytes_Type), no_arguments.get(), object);
    }
    const Object text = Object::checked(
        PyUnicode_DecodeLatin1(PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object), "strict"));
    const Object arguments =
        Object::checked(PyTuple_Pack(2, text.get(), environment_.word_latin1.get()));
    save_call(environment_.codecs_encode.get(), arguments.get(), object);
  }

  void save_list(PyObject* list, Reach reach) {
    out_.opcode(opcode::kEmptyList);
    stream_.put(list, reach);
    if (PyList_GET_SIZE(list) == 0) return;
    Py_ssize_t i = 0;
    const auto save_next = [&] {
      const Object item = Object::borrow(PyList_GET_ITEM(list, i++));
      save(item.get(), reach_with(2, item.get()));
    };
    if (PyList_GET_SIZE(list) == 1) {
      save_next();
      return out_.opcode(opcode::kAppend);
    }
    do {
      out_.opcode(opcode::kMark);
      for (int n = 0; n < kBatchSize && i < PyList_GET_SIZE(list); ++n) save_next();
      out_.opcode(opcode::kAppends);
    } while (i < PyList_GET_SIZE(list));
  }

  void save_tuple(PyObject* tuple, Reach reach) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
    if (size == 0) return out_.opcode(opcode::kEmptyTuple);
    if (size > 3) out_.opcode(opcode::kMark);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PyTuple_GET_ITEM(tuple, i);
      // A tuple that contains itself is written twice, and so are objects to which only this tuple
      // refers.
      save(item, reach == Reach::kOnce ? reach_with(1, item) : Reach::kAgain);
    }
    if (reach == Reach::kAgain) {
      if (const std::optional<std::uint32_t> number = stream_.find(tuple)) {
        return replace_tuple(size, *number);
      }
    }
    out_.tuple(static_cast<std::size_t>(size));
    stream_.put(tuple, reach);
  }

  // Discards the parts of a tuple that contains itself, because it was written with one of them.
  void replace_tuple(Py_ssize_t size, std::uint32_t number) {
    if (size > 3) {
      out_.opcode(opcode::kPopMark);
    } else {
      for (Py_ssize_t i = 0; i < size; ++i) out_.opcode(opcode::kPop);
    }
    out_.get(number);
  }
  void save_dict(PyObject* dict, Reach reach) {
    out_.opcode(opcode::kEmptyDict);
    stream_.put(dict, reach);
    const Py_ssize_t size = PyDict_GET_SIZE(dict);
    if (size == 0) return;
    Py_ssize_t position = 0;
    if (size == 1) {
      if (!save_item(dict, position)) throw HandOver{};
      return out_.opcode(opcode::kSetItem);
    }
    int n = 0;
    do {
      out_.opcode(opcode::kMark);
      for (n = 0; n < kBatchSize && save_item(dict, position);) ++n;
      out_.opcode(opcode::kSetItems);
      if (PyDict_GET_SIZE(dict) != size) throw HandOver{};  // Python's pickler raises
    } while (n == kBatchSize);
  }

  bool save_item(PyObject* dict, Py_ssize_t& position) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    if (PyDict_Next(dict, &position, &key, &value) == 0) return false;
    const Object kept_key = Object::borrow(key);
    const Object kept_value = Object::borrow(value);
    save(key, may_share_keys(dict) ? Reach::kAgain : reach_with(2, key));
    save(value, reach_with(2, value));
    return true;
  }

  void save_ordered_dict(PyObject* dict) {
    const Object state = instance_state(dict);
    stream_.new_ordered_dict();
    stream_.put(dict);
    const Object items = call_method(dict, "items");
    save_items(Object::checked(PyObject_GetIter(items.get())).get());
    if (!state) return;
    save(state.get());
    out_.opcode(opcode::kBuild);
  }

  // Writes the items of an iterator, whose batches end differently from those of a dict.
  void save_items(PyObject* iterator) {
    Object pair = next_of(iterator);
    while (pair) {
      Object next = next_of(iterator);
      if (!next) {
        save_pair(pair.get());
        return out_.opcode(opcode::kSetItem);
      }
      out_.opcode(opcode::kMark);
      save_pair(pair.get());
      int n = 1;
      while (next) {
        save_pair(next.get());
        if (++n == kBatchSize) break;
        next = next_of(iterator);
      }
      out_.opcode(opcode::kSetItems);
      if (n < kBatchSize) return;
      pair = next_of(iterator);
    }
  }

  void save_pair(PyObject* pair) {
    // The dict, its list of keys and the pair refer to a key; the dict and the pair to a value.
    PyObject* const key = PyTuple_GET_ITEM(pair, 0);
    PyObject* const value = PyTuple_GET_ITEM(pair, 1);
    save(key, reach_with(3, key));
    save(value, reach_with(2, value));
  }

  void save_call(PyObject* callable, PyObject* arguments, PyObject* object) {
    if (!stream_.get(callable)) stream_.global(callable);
    save(arguments);
    out_.opcode(opcode::kReduce);
    const std::optional<std::uint32_t> number = stream_.find(object);
    if (!number) return stream_.put(object);
    out_.opcode(opcode::kPop);  // it contains itself: its arguments have written it
    out_.get(*number);
  }
  void save_set(PyObject* set) {
    const Object items = Object::checked(PySequence_List(set));
    const Object arguments = Object::checked(PyTuple_Pack(1, items.get()));
    save_call(reinterpret_cast<PyObject*>(Py_TYPE(set)), arguments.get(), set);
  }
  void save_complex(PyObject* object) {
    const Object arguments = Object::checked(
        Py_BuildValue("(dd)", PyComplex_RealAsDouble(object), PyComplex_ImagAsDouble(object)));
    save_call(reinterpret_cast<PyObject*>(&PyComplex_Type), arguments.get(), object);
  }
  // Writes an object of torch whose __reduce__ is implemented in C.
  void save_reduced(PyObject* object) {
    const Object reduced = call_method(object, "__reduce__");
    if (PyTuple_CheckExact(reduced.get()) == 0 || PyTuple_GET_SIZE(reduced.get()) != 2) {
      throw HandOver{};
    }
    PyObject* const callable = PyTuple_GET_ITEM(reduced.get(), 0);
    PyObject* const arguments = PyTuple_GET_ITEM(reduced.get(), 1);
    if (PyType_CheckExact(callable) == 0 || PyTuple_CheckExact(arguments) == 0) throw HandOver{};
    save_call(callable, arguments, object);
  }

  const PickleEnvironment& environment_;
  PickleStream stream_;
  TensorPickler tensors_;
  PickleWriter& out_;
  int depth_ = 0;
};

}  // namespace

std::optional<PickledObject> pickle_object(PyObject* object, const StorageNumbering& numbering) {
  const PickleEnvironment& environment = PickleEnvironment::get();
  try {
    if (!environment.is_default()) return std::nullopt;
    return Pickler(environment, numbering).dump(object);
  } catch (const HandOver&) {
    return std::nullopt;
  } catch (const c10::Error&) {
    return std::nullopt;  // Python's pickler then raises the error from torch's methods
  }
}

}  // namespace ptsave
