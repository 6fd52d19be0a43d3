// Calls operators of cudnn_ops from C++, without Python, by the names that they have in torch's
// dispatcher. The kernels for CPUs are in Python, so this needs a GPU.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/cuda.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// An operator with few arguments: its C++ type is written out, and checked against the schema.
at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef shape, const at::Tensor& weight) {
  using Function = at::Tensor(const at::Tensor&, c10::SymIntArrayRef,
                              const std::optional<at::Tensor>&, std::optional<double>, bool);
  static const auto op = find("cudnn_ops::rms_norm").typed<Function>();
  return op.call(input, shape, weight, /*eps=*/1e-6, /*zero_centered=*/false);
}

// An operator with many: by name, as in Python. The schema checks types and fills in the defaults.
std::vector<c10::IValue> call(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments,
                              const std::unordered_map<std::string, c10::IValue>& named) {
  op.schema().checkAndNormalizeInputs(arguments, named);
  op.callBoxed(arguments);
  return arguments;  // now the results
}

// The largest difference, as a share of the largest number.
double difference(const at::Tensor& result, const at::Tensor& expected) {
  return ((result - expected).abs().max() / expected.abs().max()).item<double>();
}

int run() {
  const auto sdpa = find("cudnn_ops::sdpa");
  std::cout << sdpa.schema() << '\n';
  // Plans are kept on disk for the next process. In Python the import sees to that.
  if (const char* folder = std::getenv("CUDNN_OPS_CACHE_DIR")) {
    call(find("cudnn_ops::_set_store"), {folder, /*limit in bytes=*/int64_t{256} << 20}, {});
  }
  if (!torch::cuda::is_available()) {
    std::cout << "There is no GPU: nothing to compare.\n";
    return 0;
  }
  const c10::InferenceMode no_gradients;
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);

  const at::Tensor query = at::randn({2, 8, 333, 64}, options);
  const at::Tensor key = at::randn({2, 2, 333, 64}, options);
  const at::Tensor value = at::randn({2, 2, 333, 64}, options);
  const auto results = call(
      sdpa, {query, key, value},
      {{"is_causal", true}, {"enable_gqa", true}, {"window_size", std::vector<int64_t>{-1, 0}}});
  const at::Tensor expected = at::scaled_dot_product_attention(
      query, key, value, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
      /*scale=*/std::nullopt, /*enable_gqa=*/true);
  const double attention = difference(results.at(0).toTensor(), expected);

  const at::Tensor input = at::randn({333, 512}, options);
  const at::Tensor weight = at::randn({512}, options);
  const double norm =
      difference(rms_norm(input, {512}, weight), at::rms_norm(input, {512}, weight, 1e-6));

  std::cout << "attention differs from torch's by " << attention << ", rms_norm by " << norm
            << '\n';
  return attention < 0.02 && norm < 0.02 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
