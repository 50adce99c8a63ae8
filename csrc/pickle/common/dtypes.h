// The dtypes of plain tensors in pickles.  CONTRIBUTING.md lists all tables of dtypes.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace ptsave {

// A dtype whose tensors torch.empty() makes without a quantizer and without a warning.
struct PlainDtype {
  const char* name;          // torch's
  std::string_view storage;  // the storage type's name; empty for dtypes with untyped storages
  std::int64_t itemsize;
  bool can_require_grad;
};

inline constexpr std::array kPlainDtypes = {
    PlainDtype{"uint8", "ByteStorage", 1, false},
    PlainDtype{"int8", "CharStorage", 1, false},
    PlainDtype{"int16", "ShortStorage", 2, false},
    PlainDtype{"int32", "IntStorage", 4, false},
    PlainDtype{"int64", "LongStorage", 8, false},
    PlainDtype{"bool", "BoolStorage", 1, false},
    PlainDtype{"float16", "HalfStorage", 2, true},
    PlainDtype{"bfloat16", "BFloat16Storage", 2, true},
    PlainDtype{"float32", "FloatStorage", 4, true},
    PlainDtype{"float64", "DoubleStorage", 8, true},
    PlainDtype{"complex64", "ComplexFloatStorage", 8, true},
    PlainDtype{"complex128", "ComplexDoubleStorage", 16, true},
    PlainDtype{"uint16", "", 2, false},
    PlainDtype{"uint32", "", 4, false},
    PlainDtype{"uint64", "", 8, false},
    PlainDtype{"float8_e5m2", "", 1, true},
    PlainDtype{"float8_e4m3fn", "", 1, true},
    PlainDtype{"float8_e5m2fnuz", "", 1, true},
    PlainDtype{"float8_e4m3fnuz", "", 1, true},
    PlainDtype{"float8_e8m0fnu", "", 1, true},
};

}  // namespace ptsave
