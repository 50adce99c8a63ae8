#include "tensors/tensor_statistics.h"

#include "tensors/storage.h"

namespace ptsave {

std::optional<Element> element_of(c10::ScalarType type) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::Double:
      return Element::kFloat64;
    case ScalarType::Float:
      return Element::kFloat32;
    case ScalarType::Half:
      return Element::kFloat16;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::ComplexDouble:
      return Element::kComplex128;
    case ScalarType::ComplexFloat:
      return Element::kComplex64;
    case ScalarType::ComplexHalf:
      return Element::kComplex32;
    case ScalarType::Long:
      return Element::kInt64;
    case ScalarType::UInt64:
      return Element::kUInt64;
    case ScalarType::Int:
      return Element::kInt32;
    case ScalarType::UInt32:
      return Element::kUInt32;
    case ScalarType::Short:
      return Element::kInt16;
    case ScalarType::UInt16:
      return Element::kUInt16;
    case ScalarType::Char:
    case ScalarType::Int1:
    case ScalarType::Int2:
    case ScalarType::Int3:
    case ScalarType::Int4:
    case ScalarType::Int5:
    case ScalarType::Int6:
    case ScalarType::Int7:
      return Element::kInt8;
    case ScalarType::Byte:
    case ScalarType::UInt1:
    case ScalarType::UInt2:
    case ScalarType::UInt3:
    case ScalarType::UInt4:
    case ScalarType::UInt5:
    case ScalarType::UInt6:
    case ScalarType::UInt7:
      return Element::kUInt8;
    case ScalarType::Bool:
      return Element::kBool;
    case ScalarType::Float8_e4m3fn:
      return Element::kFloat8E4M3;
    case ScalarType::Float8_e4m3fnuz:
      return Element::kFloat8E4M3Uz;
    case ScalarType::Float8_e5m2:
      return Element::kFloat8E5M2;
    case ScalarType::Float8_e5m2fnuz:
      return Element::kFloat8E5M2Uz;
    case ScalarType::Float8_e8m0fnu:
      return Element::kFloat8E8M0;
    case ScalarType::Float4_e2m1fn_x2:
      return Element::kFloat4E2M1Pair;
    default:
      return std::nullopt;
  }
}

Statistics statistics_of(const at::Tensor& tensor, std::size_t n_threads) {
  const Element element = element_of(tensor.scalar_type()).value();
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (n_threads < 2 || tensor.nbytes() < kMinSharedNbytes) {
    return statistics_of(element, data, tensor.nbytes());
  }
  return copy_with_statistics(element, nullptr, data, tensor.nbytes(), n_threads);
}

Statistics copy_with_statistics(Element element, std::byte* target, const std::byte* source,
                                std::size_t nbytes, std::size_t n_threads) {
  ChunkedStatistics chunks(element, source, nbytes, target);
  share_out(chunks.n_chunks(), nbytes < kMinSharedNbytes ? 1 : n_threads,
            [&](std::size_t i) { chunks.take(i); });
  return chunks.result();
}

}  // namespace ptsave
