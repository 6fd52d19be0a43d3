// Max pooling: schemas, checks, the public operator and its derivative. The CUDA kernels are called
// in max_pool_cuda.cpp; those for CPUs and fake tensors are in cudnn_ops/ops/max_pool.py.

#include "ops/max_pool/max_pool.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <ATen/ops/max_pool2d.h>
#include <torch/library.h>

#include <limits>
#include <string>

namespace cudnn_ops {
namespace {

constexpr char kMaxPool[] = "cudnn_ops.max_pool2d";
constexpr char kMaxPoolBackward[] = "MaxPoolBackward";

// Offsets are of 8 bits.
constexpr int64_t kMostTaps = 255;
constexpr int64_t kMostStep = std::numeric_limits<int32_t>::max() / 2;

const Operator<MaxPoolResults, MaxPoolForward>& max_pool_op() {
  static const Operator<MaxPoolResults, MaxPoolForward> op("cudnn_ops::_max_pool2d");
  return op;
}

const Operator<at::Tensor, MaxPoolBackward>& max_pool_backward_op() {
  static const Operator<at::Tensor, MaxPoolBackward> op("cudnn_ops::_max_pool2d_backward");
  return op;
}

// One number stands for both.
MaxPoolPair pair_of(at::IntArrayRef numbers, const char* name) {
  TORCH_CHECK_VALUE(numbers.size() == 1 || numbers.size() == 2, kMaxPool, ": ", name,
                    " must be one number, or one for H and one for W; got ", numbers);
  return {numbers.front(), numbers.back()};
}

void check_numbers(const MaxPoolNumbers& numbers) {
  const auto& [kernel_size, stride, padding, dilation] = numbers;
  const auto check_positive = [](const MaxPoolPair& pair, const char* name) {
    const auto is_positive = [](int64_t number) { return number > 0 && number <= kMostStep; };
    TORCH_CHECK_VALUE(pair.size() == 2 && is_positive(pair[0]) && is_positive(pair[1]), kMaxPool,
                      ": ", name, " must be positive, one number for H and one for W; got ",
                      at::IntArrayRef(pair));
  };
  check_positive(kernel_size, "kernel_size");
  check_positive(stride, "stride");
  check_positive(dilation, "dilation");
  TORCH_CHECK_VALUE(padding.size() == 2, kMaxPool,
                    ": padding must be one number for H and one for W; got ",
                    at::IntArrayRef(padding));
  for (size_t dim = 0; dim < 2; ++dim) {
    TORCH_CHECK_VALUE(padding[dim] >= 0 && padding[dim] <= kernel_size[dim] / 2, kMaxPool,
                      ": padding must not be negative, and be at most half of kernel_size, ",
                      at::IntArrayRef(kernel_size), "; got ", at::IntArrayRef(padding));
  }
}

// Of a dimension of images; less than 1 where the window does not fit.
c10::SymInt pooled_size(const c10::SymInt& size, const MaxPoolNumbers& numbers, size_t dim,
                        bool ceil_mode) {
  const int64_t padding = numbers.padding[dim], stride = numbers.stride[dim];
  const int64_t reach = (numbers.kernel_size[dim] - 1) * numbers.dilation[dim];
  const c10::SymInt room = size + (2 * padding - reach - 1 + (ceil_mode ? stride - 1 : 0));
  if (room < 0) return 0;
  const c10::SymInt count = room / stride + 1;
  // No window begins behind the image.
  return ceil_mode && (count - 1) * stride >= size + padding ? count - 1 : count;
}

// Whether kernels of ours know windows of this size, which is positive.
bool has_few_taps(const MaxPoolPair& kernel_size) {
  return kernel_size[0] <= kMostTaps && kernel_size[1] <= kMostTaps &&
         kernel_size[0] * kernel_size[1] <= kMostTaps;
}

void check_taps(const MaxPoolNumbers& numbers) {
  const auto& kernel_size = numbers.kernel_size;
  TORCH_CHECK_NOT_IMPLEMENTED(has_few_taps(kernel_size), kMaxPool, ": kernels have at most ",
                              kMostTaps, " numbers in a window, got kernel_size ",
                              at::IntArrayRef(kernel_size),
                              "; cudnn_ops.max_pool2d and torch's compute larger ones");
}

// All but how many numbers a window has; the sizes of the output.
at::SymDimVector checked_size(const MaxPool& args) {
  const auto& input = args.input;
  TORCH_CHECK_TYPE(input.defined(), kMaxPool, ": input must be a tensor, got None");
  TORCH_CHECK_VALUE(input.dim() == 4, kMaxPool, ": input must be [N, C, H, W] or [C, H, W]; got ",
                    input.sym_sizes());
  TORCH_CHECK_TYPE(is_computed_in(input.scalar_type()), kMaxPool,
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.scalar_type());
  check_numbers(args.numbers);
  const auto sizes = input.sym_sizes();
  TORCH_CHECK_VALUE(sizes[1] != 0 && sizes[2] != 0 && sizes[3] != 0, kMaxPool,
                    ": input must not be empty but for its batch; got ", sizes);
  at::SymDimVector result{sizes[0], sizes[1]};
  for (size_t dim = 0; dim < 2; ++dim) {
    const auto size = pooled_size(sizes[2 + dim], args.numbers, dim, args.ceil_mode);
    TORCH_CHECK_VALUE(size > 0, kMaxPool, ": kernel_size ",
                      at::IntArrayRef(args.numbers.kernel_size),
                      " is larger than the padded input, ", sizes, " with padding ",
                      at::IntArrayRef(args.numbers.padding), " and dilation ",
                      at::IntArrayRef(args.numbers.dilation));
    result.push_back(size);
  }
  return result;
}

std::vector<c10::SymInt> size_of(const at::Tensor& input, at::IntArrayRef kernel_size,
                                 at::IntArrayRef stride, at::IntArrayRef padding,
                                 at::IntArrayRef dilation, bool ceil_mode) {
  const Borrowed<MaxPool> args(input, kernel_size, stride, padding, dilation, ceil_mode);
  const auto sizes = max_pool_size(*args);
  return {sizes.begin(), sizes.end()};
}

struct MaxPoolHistory {
  at::Tensor offsets;
  at::SymDimVector size;
  MaxPoolNumbers numbers;
  CUDNN_OPS_FIELDS(offsets, size, numbers)
};

variable_list max_pool_gradients(const variable_list& grads, const Wanted<1>& wanted,
                                 const MaxPoolHistory& saved) {
  if (!wanted[0]) return variable_list(1);
  return {max_pool_backward_op().call(
      {grads[0], saved.offsets, std::nullopt, saved.size, saved.numbers})};
}

using MaxPoolBackwardNode = BackwardNode<kMaxPoolBackward, max_pool_gradients>;

MaxPoolResults max_pool_autograd(c10::DispatchKeySet keys, const MaxPoolForward& args) {
  const MaxPool& pool = args.pool;
  refuse_forward_mode(kMaxPool, pool);
  if (!torch::autograd::compute_requires_grad(pool.input)) {
    return call_below_autograd(max_pool_op(), keys, args);
  }
  const MaxPoolResults results =
      call_below_autograd(max_pool_op(), keys, pool, /*with_offsets=*/true);
  const auto& [out, offsets] = results;
  MaxPoolHistory history;
  history.offsets = offsets;
  history.size = {pool.input.sym_size(2), pool.input.sym_size(3)};
  history.numbers = pool.numbers;
  set_derivative<MaxPoolBackwardNode>(torch::autograd::collect_next_edges(pool.input), {out},
                                      history);
  return results;
}

at::Tensor max_pool_backward_autograd(c10::DispatchKeySet keys, const MaxPoolBackward& args) {
  return without_derivative(
      max_pool_backward_op(), keys, args, kMaxPool,
      "cudnn_ops: double backward of max_pool2d is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace

at::Tensor max_pool2d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  const auto kernel = pair_of(kernel_size, "kernel_size");
  const auto step = stride.empty() ? kernel : pair_of(stride, "stride");
  const auto pad = pair_of(padding, "padding"), spread = pair_of(dilation, "dilation");
  const bool is_batch = !input.defined() || input.dim() != 3;
  const at::Tensor batch = is_batch ? input : input.unsqueeze(0);
  const Borrowed<MaxPool> args(batch, kernel, step, pad, spread, ceil_mode);
  at::Tensor out;
  if (has_few_taps(kernel)) {
    out = std::get<0>(max_pool_op().call_with(*args, /*with_offsets=*/false));
  } else {
    checked_size(*args);
    out = at::max_pool2d(batch, kernel, step, pad, spread, ceil_mode);
  }
  return is_batch ? out : out.squeeze(0);
}

at::SymDimVector max_pool_size(const MaxPool& args) {
  const auto size = checked_size(args);
  check_taps(args.numbers);
  return size;
}

void check_max_pool_backward(const MaxPoolBackward& args) {
  const auto& [grad_out, offsets, grad_more, size, numbers] = args;
  TORCH_CHECK_TYPE(is_computed_in(grad_out.scalar_type()), kMaxPool,
                   " backward: grad_out must be float16, bfloat16 or float32 (float64 too on a "
                   "CPU); got ",
                   grad_out.scalar_type());
  check_numbers(numbers);
  check_taps(numbers);
  TORCH_CHECK_VALUE(size.size() == 2, kMaxPool, " backward: size must be the input's H and W; got ",
                    c10::SymIntArrayRef(size));
  const auto is_pooled = [&](size_t dim) {
    const auto found = grad_out.sym_size(static_cast<int64_t>(2 + dim));
    return found > 0 && (found == pooled_size(size[dim], numbers, dim, /*ceil_mode=*/false) ||
                         found == pooled_size(size[dim], numbers, dim, /*ceil_mode=*/true));
  };
  TORCH_CHECK_VALUE(grad_out.dim() == 4 && is_pooled(0) && is_pooled(1), kMaxPool,
                    " backward: grad_out must be of the output's shape; got ", grad_out.sym_sizes(),
                    " for an input of H and W ", c10::SymIntArrayRef(size));
  TORCH_CHECK_TYPE(offsets.scalar_type() == at::kByte, kMaxPool,
                   " backward: offsets must be what the forward gave, uint8; got ",
                   offsets.scalar_type());
  TORCH_CHECK_VALUE(
      offsets.sym_sizes() == grad_out.sym_sizes() && offsets.device() == grad_out.device(),
      kMaxPool, " backward: offsets must be of grad_out's shape, on its device, ",
      grad_out.sym_sizes(), " on ", grad_out.device(), "; got ", offsets.sym_sizes(), " on ",
      offsets.device());
  if (grad_more) check_like(*grad_more, grad_out, kMaxPool, "grad_more");
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "max_pool2d(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
      "int[2] dilation=1, bool ceil_mode=False) -> Tensor",
      max_pool2d, tags);
  const std::string numbers = "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation";
  const std::string forward = "(Tensor input, " + numbers + ", bool ceil_mode";
  const std::string backward =
      "(Tensor grad_out, Tensor offsets, Tensor? grad_more, SymInt[] size, " + numbers;
  m.def(("_max_pool2d" + forward + ", bool with_offsets) -> (Tensor out, Tensor offsets)").c_str(),
        tags);
  m.def(("_max_pool2d_backward" + backward + ") -> Tensor").c_str(), tags);
  m.def(("_max_pool2d_size" + forward + ") -> SymInt[]").c_str(), size_of, tags);
  m.def(("_max_pool2d_backward_check" + backward + ") -> ()").c_str(),
        kernel<check_max_pool_backward>, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_max_pool2d", cudnn_ops::kernel<cudnn_ops::max_pool_autograd>);
  m.impl("_max_pool2d_backward", cudnn_ops::kernel<cudnn_ops::max_pool_backward_autograd>);
}
