#include "ops/linear/lt_product.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/hash.h>
#include <cublasLt.h>
#include <dlfcn.h>

#include <array>
#include <mutex>
#include <string>
#include <unordered_map>

namespace cudnn_ops {
namespace {

// The functions of the library that is loaded, because libtorch_cuda links to it. Nothing of ours
// does: whichever copy torch brought is the copy that torch's handle belongs to.
struct LtLibrary {
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescInit_internal) init_desc;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;

  LtLibrary() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    TORCH_CHECK(library != nullptr, "cudnn_ops.linear: torch has not loaded ", name,
                ", which this build of cudnn_ops is for");
    const auto resolve = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
      TORCH_CHECK(function != nullptr, "cudnn_ops.linear: ", name, " has no ", symbol);
    };
    resolve(matmul, "cublasLtMatmul");
    resolve(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    resolve(init_desc, "cublasLtMatmulDescInit_internal");
    resolve(set_desc, "cublasLtMatmulDescSetAttribute");
    resolve(init_layout, "cublasLtMatrixLayoutInit_internal");
    resolve(init_preference, "cublasLtMatmulPreferenceInit_internal");
    resolve(set_preference, "cublasLtMatmulPreferenceSetAttribute");
  }
};

const LtLibrary& lt() {
  static const auto* library = new LtLibrary();
  return *library;
}

void check(cublasStatus_t status, const char* what) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cudnn_ops.linear: cuBLASLt's ", what,
              " failed with status ", static_cast<int>(status));
}

// A matrix as cuBLASLt sees it, which counts down columns: its transpose. Rows that lie dense are
// columns there, and what lies the other way is marked as transposed.
struct Operand {
  at::Tensor tensor;
  bool is_transposed = false;
  int64_t leading = 0;

  // Copies what has no unit stride, or rows that overlap.
  explicit Operand(const at::Tensor& matrix) : tensor(matrix) {
    if (is_dense_along(1)) {
      leading = leading_of(0);
    } else if (is_dense_along(0)) {
      is_transposed = true;
      leading = leading_of(1);
    } else {
      tensor = matrix.contiguous();
      leading = tensor.size(1);
    }
  }

 private:
  bool is_dense_along(int64_t dim) const {
    const int64_t other = 1 - dim;
    return (tensor.stride(dim) == 1 || tensor.size(dim) == 1) &&
           (tensor.size(other) == 1 || tensor.stride(other) >= tensor.size(dim));
  }
  // Of a single row the stride says nothing.
  int64_t leading_of(int64_t dim) const {
    return tensor.size(dim) == 1 ? tensor.size(1 - dim) : tensor.stride(dim);
  }
};

cublasLtEpilogue_t epilogue_of(const LtProduct& product) {
  if (product.row_sums.defined()) return CUBLASLT_EPILOGUE_BGRADB;
  if (product.slope_of) {
    return product.column_sums.defined() ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
  }
  const bool has_bias = product.bias.has_value();
  switch (product.activation) {
    case Activation::kRelu: return has_bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::kGeluTanh:
      if (product.before.defined()) {
        return has_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      }
      return has_bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default: return has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

// The vector that an epilogue reads or writes, null where there is none.
const void* vector_of(const LtProduct& product) {
  if (product.bias) return product.bias->const_data_ptr();
  if (product.column_sums.defined()) return product.column_sums.mutable_data_ptr();
  if (product.row_sums.defined()) return product.row_sums.mutable_data_ptr();
  return nullptr;
}

// Likewise the matrix.
const void* matrix_of(const LtProduct& product) {
  if (product.slope_of) return product.slope_of->const_data_ptr();
  return product.before.defined() ? product.before.mutable_data_ptr() : nullptr;
}

// The largest power of two, up to 256, that an address is a multiple of.
uint32_t alignment_of(const void* address) {
  constexpr uint32_t kMost = 256;
  const auto value = reinterpret_cast<uintptr_t>(address);
  const auto least = static_cast<uint32_t>(value & -value);
  return value == 0 || value % kMost == 0 ? kMost : least;
}

// How sums of parts of the product may be added up, as torch's own products do.
uint32_t reduction_schemes(at::ScalarType dtype) {
  const auto& context = at::globalContext();
  const auto option =
      dtype == at::kHalf ? context.allowFP16ReductionCuBLAS() : context.allowBF16ReductionCuBLAS();
  switch (option) {
    case at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK:
      return CUBLASLT_REDUCTION_SCHEME_MASK;
    case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
      return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    default: return CUBLASLT_REDUCTION_SCHEME_NONE;
  }
}

struct Algorithm {
  bool is_there = false;
  cublasLtMatmulAlgo_t algo{};
  size_t workspace = 0;
};

// All that the choice of an algorithm depends on.
using Key = std::array<int64_t, 12>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    size_t hash = 0;
    for (const int64_t word : key) hash = c10::hash_combine(hash, static_cast<size_t>(word));
    return hash;
  }
};

// What cuBLASLt's heuristics chose. Forgotten as a whole where calls with ever new shapes have
// filled it: asking again takes some microseconds.
class Algorithms {
 public:
  std::optional<Algorithm> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(key);
    if (found == known_.end()) return std::nullopt;
    return found->second;
  }
  void add(const Key& key, const Algorithm& algorithm) {
    constexpr size_t kMost = 4096;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (known_.size() >= kMost) known_.clear();
    known_.insert_or_assign(key, algorithm);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, Algorithm, KeyHash> known_;
};

Algorithms& algorithms() {
  static auto* all = new Algorithms();
  return *all;
}

// cuBLASLt's descriptions of a call.
struct Descriptions {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t left, right, out;

  Descriptions(const LtProduct& product, const Operand& a, const Operand& b,
               cublasLtEpilogue_t epilogue) {
    const auto type = product.out.scalar_type() == at::kHalf ? CUDA_R_16F : CUDA_R_16BF;
    check(lt().init_desc(&desc, sizeof(desc), CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    // Ours are transposes, in which the factors change places.
    set(CUBLASLT_MATMUL_DESC_TRANSA, operation(b));
    set(CUBLASLT_MATMUL_DESC_TRANSB, operation(a));
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    const void* vector = vector_of(product);
    if (vector != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
    const int64_t columns = product.out.size(1);
    const void* matrix = matrix_of(product);
    if (matrix != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, matrix);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, columns);
    }
    lay_out(right, type, b);
    lay_out(left, type, a);
    check(lt().init_layout(&out, sizeof(out), type, static_cast<uint64_t>(columns),
                           static_cast<uint64_t>(product.out.size(0)), columns),
          "layout");
  }

 private:
  static cublasOperation_t operation(const Operand& operand) {
    return operand.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  }
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check(lt().set_desc(&desc, attribute, &value, sizeof(value)), "attribute");
  }
  static void lay_out(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType type,
                      const Operand& operand) {
    const auto dense = operand.tensor.size(operand.is_transposed ? 0 : 1);
    const auto others = operand.tensor.size(operand.is_transposed ? 1 : 0);
    check(lt().init_layout(&layout, sizeof(layout), type, static_cast<uint64_t>(dense),
                           static_cast<uint64_t>(others), operand.leading),
          "layout");
  }
};

Algorithm ask(const LtProduct& product, const Operand& a, const Operand& b,
              Descriptions& descriptions) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check(lt().init_preference(&preference, sizeof(preference)), "preference");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(lt().set_preference(&preference, attribute, &value, sizeof(value)), "preference");
  };
  const auto address = [](const at::Tensor& tensor) { return tensor.const_data_ptr(); };
  const void* added = product.added ? address(*product.added) : address(product.out);
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      static_cast<uint64_t>(at::cuda::getCUDABlasLtWorkspaceSize()));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction_schemes(product.out.scalar_type()));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(address(b.tensor)));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(address(a.tensor)));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(added));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(address(product.out)));
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  const auto status = lt().heuristic(at::cuda::getCurrentCUDABlasLtHandle(), &descriptions.desc,
                                     &descriptions.right, &descriptions.left, &descriptions.out,
                                     &descriptions.out, &preference, 1, &result, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0 || result.state != CUBLAS_STATUS_SUCCESS) {
    return {};
  }
  return {true, result.algo, result.workspaceSize};
}

Key key_of(const LtProduct& product, const Operand& a, const Operand& b,
           cublasLtEpilogue_t epilogue) {
  const auto dtype = product.out.scalar_type();
  const auto alignments = [](std::initializer_list<const void*> addresses) {
    int64_t result = 0;
    for (const void* address : addresses) result = result << 9 | alignment_of(address);
    return result;
  };
  const int64_t flags = (a.is_transposed ? 1 : 0) | (b.is_transposed ? 2 : 0) |
                        (product.added ? 4 : 0) |
                        static_cast<int64_t>(reduction_schemes(dtype)) << 3;
  return {c10::cuda::current_device(),
          static_cast<int64_t>(dtype),
          static_cast<int64_t>(epilogue),
          flags,
          a.tensor.size(0),
          a.tensor.size(1),
          b.tensor.size(1),
          a.leading,
          b.leading,
          alignments(
              {a.tensor.const_data_ptr(), b.tensor.const_data_ptr(), product.out.const_data_ptr()}),
          alignments({product.added ? product.added->const_data_ptr() : nullptr, vector_of(product),
                      matrix_of(product)}),
          static_cast<int64_t>(at::cuda::getCUDABlasLtWorkspaceSize())};
}

}  // namespace

bool has_lt_epilogue(at::ScalarType dtype, Activation activation) {
  // Its GELU is the tanh one, by approximations that are as good as 16 bits.
  return (dtype == at::kHalf || dtype == at::kBFloat16) &&
         (activation == Activation::kNone || activation == Activation::kRelu ||
          activation == Activation::kGeluTanh);
}

bool run_lt(const LtProduct& product) {
  if (!has_lt_epilogue(product.out.scalar_type(), product.activation)) return false;
  constexpr int64_t kMatrixColumns = 8;  // what an epilogue's matrix must have a multiple of
  if (matrix_of(product) != nullptr && product.out.size(1) % kMatrixColumns != 0) return false;
  const Operand a(product.left), b(product.right);
  const auto epilogue = epilogue_of(product);
  Descriptions descriptions(product, a, b, epilogue);
  const Key key = key_of(product, a, b, epilogue);
  auto algorithm = algorithms().find(key);
  if (!algorithm) {
    algorithm = ask(product, a, b, descriptions);
    algorithms().add(key, *algorithm);
  }
  if (!algorithm->is_there) return false;
  const at::Tensor workspace = at::detail::empty_cuda(
      {static_cast<int64_t>(algorithm->workspace)}, at::kByte, product.out.device(), std::nullopt);
  const float one = 1, added = product.added ? 1 : 0;
  const void* c = product.added ? product.added->const_data_ptr() : product.out.const_data_ptr();
  check(
      lt().matmul(at::cuda::getCurrentCUDABlasLtHandle(), &descriptions.desc, &one,
                  b.tensor.const_data_ptr(), &descriptions.right, a.tensor.const_data_ptr(),
                  &descriptions.left, &added, c, &descriptions.out, product.out.mutable_data_ptr(),
                  &descriptions.out, &algorithm->algo, workspace.mutable_data_ptr(),
                  algorithm->workspace, c10::cuda::getCurrentCUDAStream()),
      "product");
  return true;
}

}  // namespace cudnn_ops
