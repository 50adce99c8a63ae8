#include "pickle/out/pickle_stream.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>

#include "pickle/common/object.h"

namespace ptsave {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr Py_ssize_t kInitialNbytes = 1024;

}  // namespace

PickleWriter::PickleWriter()
    : bytes_(Object::checked(PyBytes_FromStringAndSize(nullptr, kInitialNbytes))),
      next_(PyBytes_AS_STRING(bytes_.get())),
      end_(next_ + kInitialNbytes) {}

void PickleWriter::large_integer(std::int64_t value) {
  if (value >= 0 && value < 0x10000) {
    with_operand(opcode::kBinInt2, static_cast<std::uint16_t>(value));
  } else if (value >= std::numeric_limits<std::int32_t>::min() &&
             value <= std::numeric_limits<std::int32_t>::max()) {
    with_operand(opcode::kBinInt, static_cast<std::int32_t>(value));
  } else {
    // Leave out bytes that only repeat the sign.
    std::size_t n = sizeof value;
    const auto upper_bits = [&](std::size_t n_bits) { return value >> n_bits; };
    while (upper_bits(8 * (n - 1) - 1) == 0 || upper_bits(8 * (n - 1) - 1) == -1) --n;
    std::array<char, sizeof value> bytes{};
    std::memcpy(bytes.data(), &value, sizeof value);
    long_integer({bytes.data(), n});
  }
}

void PickleWriter::long_integer(std::string_view bytes) {
  if (bytes.size() < 256) {
    with_operand(opcode::kLong1, static_cast<std::uint8_t>(bytes.size()));
  } else {
    with_operand(opcode::kLong4, static_cast<std::uint32_t>(bytes.size()));
  }
  append(bytes);
}

void PickleWriter::real(double value) {
  auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
  std::ranges::reverse(bytes);
  opcode(opcode::kBinFloat);
  append({bytes.data(), bytes.size()});
}

Object PickleWriter::finish() {
  resize(static_cast<std::size_t>(next_ - PyBytes_AS_STRING(bytes_.get())));
  return std::move(bytes_);
}

void PickleWriter::grow(std::size_t n) {
  const auto capacity = static_cast<std::size_t>(end_ - PyBytes_AS_STRING(bytes_.get()));
  resize(2 * capacity + n);
}

void PickleWriter::resize(std::size_t nbytes) {
  const std::ptrdiff_t used = next_ - PyBytes_AS_STRING(bytes_.get());
  PyObject* bytes = bytes_.release();
  checked(_PyBytes_Resize(&bytes, static_cast<Py_ssize_t>(nbytes)));
  bytes_ = Object::steal(bytes);
  next_ = PyBytes_AS_STRING(bytes) + used;
  end_ = PyBytes_AS_STRING(bytes) + nbytes;
}

namespace {

// A str attribute of a class, function or torch object.
Object text_attribute(PyObject* object, const char* name) {
  Object text = attribute_or_nothing(object, name);
  if (!text || PyUnicode_CheckExact(text.get()) == 0) throw HandOver{};
  return text;
}

std::string_view ascii(PyObject* text) {
  if (PyUnicode_CheckExact(text) == 0 || PyUnicode_IS_COMPACT_ASCII(text) == 0) throw HandOver{};
  return {static_cast<const char*>(PyUnicode_DATA(text)),
          static_cast<std::size_t>(PyUnicode_GET_LENGTH(text))};
}

// Whether the object is the module's attribute of that name.
bool is_found(PyObject* object, PyObject* module_name, PyObject* name) {
  const Object module = Object::steal(PyImport_GetModule(module_name));
  if (!module || PyModule_CheckExact(module.get()) == 0) {
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    return false;
  }
  PyObject* const found = PyDict_GetItemWithError(PyModule_GetDict(module.get()), name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw PythonError{};
  return found == object;
}

PyObject* item_or_null(PyObject* dict, PyObject* key) {
  PyObject* const item = PyDict_GetItemWithError(dict, key);
  if (item == nullptr && PyErr_Occurred() != nullptr) throw PythonError{};
  return item;
}

}  // namespace

bool PickleStream::get(PyObject* object) {
  const std::optional<std::uint32_t> number = memo_.find(object);
  if (number) out_.get(*number);
  return number.has_value();
}

void PickleStream::text(Recurring& text) {
  recurring(text, [this](PyObject* object) { this->text(object, Reach::kAgain); });
}

void PickleStream::characters(PyObject* text) {
  if (PyUnicode_IS_COMPACT_ASCII(text) != 0) {
    const auto size = static_cast<std::size_t>(PyUnicode_GET_LENGTH(text));
    if (size > std::numeric_limits<std::uint32_t>::max()) throw HandOver{};
    return out_.text({static_cast<const char*>(PyUnicode_DATA(text)), size});
  }
  const Object utf8 = Object::checked(PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass"));
  const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(utf8.get()));
  if (size > std::numeric_limits<std::uint32_t>::max()) throw HandOver{};
  out_.text({PyBytes_AS_STRING(utf8.get()), size});
}

void PickleStream::global(Recurring& object) {
  recurring(object, [this](PyObject* found) { global(found); });
}

void PickleStream::global(PyObject* object) {
  global(object, text_attribute(object, "__qualname__"));
}

void PickleStream::reduced_to_name(Recurring& object) {
  recurring(object, [this](PyObject* found) { reduced_to_name(found); });
}

void PickleStream::reduced_to_name(PyObject* object) {
  const Object name = call_method(object, "__reduce__");
  global(object, name);
}

void PickleStream::global(PyObject* object, const Object& global_name) {
  const Object module_name = text_attribute(object, "__module__");
  if (ascii(global_name.get()).find('.') != std::string_view::npos) throw HandOver{};
  if (!is_found(object, module_name.get(), global_name.get())) throw HandOver{};
  const auto [module_in_python_2, name_in_python_2] = names_in_python_2(module_name, global_name);
  out_.opcode(opcode::kGlobal);
  out_.append(ascii(module_in_python_2.get()));
  out_.append("\n");
  out_.append(ascii(name_in_python_2.get()));
  out_.append("\n");
  put(object);
}

std::pair<Object, Object> PickleStream::names_in_python_2(Object module, Object name) const {
  const Object key = Object::checked(PyTuple_Pack(2, module.get(), name.get()));
  PyObject* const both = item_or_null(environment_.global_names(), key.get());
  if (both != nullptr) {
    if (PyTuple_CheckExact(both) == 0 || PyTuple_GET_SIZE(both) != 2) throw HandOver{};
    return {Object::borrow(PyTuple_GET_ITEM(both, 0)), Object::borrow(PyTuple_GET_ITEM(both, 1))};
  }
  PyObject* const renamed = item_or_null(environment_.module_names(), module.get());
  return {renamed == nullptr ? std::move(module) : Object::borrow(renamed), std::move(name)};
}

}  // namespace ptsave
