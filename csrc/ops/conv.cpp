// Convolutions with their epilogue: schemas, checks, and the public operators, which are made of
// one operator with a kernel and a derivative (conv_cuda.cpp, conv_autograd.cpp; the CPU and fake
// kernels are in cudnn_ops/ops/conv.py).

#include "conv.h"

#include <ATen/ops/add.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kChannelDims = 2;  // batch and channels come first

ConvActivation activation_of(std::string_view name, const char* op) {
  constexpr std::array<std::string_view, 5> kNames{"none", "relu", "silu", "gelu", "gelu_tanh"};
  const auto* found = std::find(kNames.begin(), kNames.end(), name);
  TORCH_CHECK_VALUE(found != kNames.end(), op,
                    ": activation must be \"none\", \"relu\", \"silu\", \"gelu\" or "
                    "\"gelu_tanh\", got \"",
                    name, "\"");
  return static_cast<ConvActivation>(found - kNames.begin());
}

// One number for every dimension, or one for all.
SymInts expand(c10::SymIntArrayRef numbers, int64_t dims, const char* name, const char* op) {
  TORCH_CHECK_VALUE(numbers.size() == 1 || static_cast<int64_t>(numbers.size()) == dims, op, ": ",
                    name, " must have 1 or ", dims, " numbers, got ", numbers);
  return numbers.size() == 1 ? SymInts(static_cast<size_t>(dims), numbers[0])
                             : SymInts(numbers.begin(), numbers.end());
}

// Before each dimension, then behind each: "same" may need one more behind.
SymInts padding_of(std::string_view name, const at::Tensor& weight, const SymInts& stride,
                   const SymInts& dilation, const char* op) {
  TORCH_CHECK_VALUE(name == "same" || name == "valid", op,
                    ": padding must be whole numbers, \"same\" or \"valid\", got \"", name, "\"");
  const size_t dims = stride.size();
  SymInts padding(2 * dims, 0);
  if (name == "valid") return padding;
  for (size_t dim = 0; dim < dims; ++dim) {
    TORCH_CHECK_VALUE(stride[dim] == 1, op, ": padding \"same\" needs a stride of 1");
    const c10::SymInt total =
        dilation[dim] * (weight.sym_size(static_cast<int64_t>(dim) + kChannelDims) - 1);
    padding[dim] = total / 2;
    padding[dims + dim] = total - total / 2;
  }
  return padding;
}

// Kernels that lie side by side on an image of few channels, as a vision transformer's: cuDNN has
// no good engine for that, and a matrix product of the patches does.
bool is_of_patches(const Conv& args) {
  constexpr int64_t kMostChannels = 4;
  const auto channels = args.input.sym_size(1).maybe_as_int();
  if (!args.input.is_cuda() || !channels || *channels > kMostChannels || args.groups != 1) {
    return false;
  }
  for (size_t dim = 0; dim < args.stride.size(); ++dim) {
    if (args.stride[dim] != args.weight.sym_size(static_cast<int64_t>(dim) + kChannelDims) ||
        args.stride[dim] == 1 || args.dilation[dim] != 1 || args.padding[dim] != 0 ||
        args.padding[args.stride.size() + dim] != 0) {
      return false;
    }
  }
  return true;
}

// Of torch's operators, which know their derivatives.
at::Tensor conv_of_patches(const Conv& args) {
  check_conv(args);
  const auto dims = static_cast<int64_t>(args.stride.size());
  const auto sizes = conv_output_sizes(args);
  at::Tensor x = args.input;
  SymInts split{sizes[0], args.input.sym_size(1)};
  std::vector<int64_t> order{0}, within{1}, back{0, dims + 1};
  for (int64_t dim = 0; dim < dims; ++dim) {
    const int64_t index = dim + kChannelDims;
    const auto &count = sizes[static_cast<size_t>(index)],
               &size = args.stride[static_cast<size_t>(dim)];
    x = x.narrow_symint(index, 0, count * size);
    split.push_back(count);
    split.push_back(size);
    order.push_back(2 * dim + 2);
    within.push_back(2 * dim + 3);
    back.push_back(dim + 1);
  }
  order.insert(order.end(), within.begin(), within.end());
  SymInts rows{sizes[0]};
  rows.append(sizes.begin() + kChannelDims, sizes.end());
  rows.push_back(-1);
  const at::Tensor patches = x.reshape_symint(split).permute(order).reshape_symint(rows);
  at::Tensor out = at::linear(patches, args.weight.flatten(1), args.bias).permute(back);
  if (args.residual) out = at::add(out, *args.residual);
  return activate(out, args.activation);
}

at::Tensor conv(const Conv& args) {
  if (is_of_patches(args)) return conv_of_patches(args);
  const bool needs_grad =
      torch::autograd::compute_requires_grad(args.input, args.weight, args.bias, args.residual);
  return std::get<0>(conv_op().call(args.input, args.weight, args.bias, args.residual, args.stride,
                                    args.padding, args.dilation, args.groups,
                                    static_cast<int64_t>(args.activation),
                                    needs_grad && needs_before(args.activation)));
}

template <int64_t dims>
struct Name;
template <>
struct Name<1> {
  static constexpr const char* value = "cudnn_ops.conv1d";
};
template <>
struct Name<2> {
  static constexpr const char* value = "cudnn_ops.conv2d";
};
template <>
struct Name<3> {
  static constexpr const char* value = "cudnn_ops.conv3d";
};

// `padding` as numbers or as a name.
template <int64_t dims, class Padding>
at::Tensor public_conv(const at::Tensor& input, const at::Tensor& weight,
                       const OptionalTensor& bias, c10::SymIntArrayRef stride, Padding padding,
                       c10::SymIntArrayRef dilation, c10::SymInt groups,
                       std::string_view activation, const OptionalTensor& residual) {
  const char* op = Name<dims>::value;
  TORCH_CHECK_VALUE((input.dim() == dims + kChannelDims || input.dim() == dims + 1) &&
                        weight.dim() == dims + kChannelDims,
                    op, ": input must have ", dims + kChannelDims, " dimensions (", dims + 1,
                    " without a batch) and weight ", dims + kChannelDims, "; got ", input.dim(),
                    " and ", weight.dim());
  const bool is_single = input.dim() == dims + 1;
  SymInts strides = expand(stride, dims, "stride", op);
  SymInts dilations = expand(dilation, dims, "dilation", op);
  SymInts paddings;
  if constexpr (std::is_same_v<Padding, std::string_view>) {
    paddings = padding_of(padding, weight, strides, dilations, op);
  } else {
    paddings = expand(padding, dims, "padding", op);
    for (int64_t dim = 0; dim < dims; ++dim) paddings.push_back(paddings[dim]);
  }
  at::Tensor x = input, w = weight;
  OptionalTensor other = residual;
  if (is_single) {
    x = x.unsqueeze(0);
    if (other) other = other->unsqueeze(0);
  }
  if constexpr (dims == 1) {
    // One row of an image.
    x = x.unsqueeze(2), w = w.unsqueeze(2);
    if (other) other = other->unsqueeze(2);
    strides.insert(strides.begin(), 1);
    dilations.insert(dilations.begin(), 1);
    paddings = {0, paddings[0], 0, paddings[1]};
  }
  at::Tensor out = conv(
      {x, w, bias, other, strides, paddings, dilations, groups, activation_of(activation, op)});
  if constexpr (dims == 1) out = out.squeeze(2);
  return is_single ? out.squeeze(0) : out;
}

// The sizes of the result, checked.
std::vector<c10::SymInt> conv_size(const at::Tensor& input, const at::Tensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& residual,
                                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                   c10::SymIntArrayRef dilation, c10::SymInt groups) {
  const Conv args{
      input, weight, bias, residual, stride, padding, dilation, groups, ConvActivation::kNone};
  check_conv(args);
  const SymInts sizes = conv_output_sizes(args);
  return {sizes.begin(), sizes.end()};
}

template <class Function>
void define(torch::Library& m, const std::string& name, const std::string& sizes,
            const std::string& padding, Function function) {
  const std::string schema = name + "(Tensor input, Tensor weight, Tensor? bias=None, " + sizes +
                             " stride=1, " + padding + ", " + sizes +
                             " dilation=1, SymInt groups=1, str activation=\"none\", "
                             "Tensor? residual=None) -> Tensor";
  m.def(schema.c_str(), function, {at::Tag::pt2_compliant_tag});
}

template <int64_t dims>
void define_dims(torch::Library& m, const std::string& name) {
  const std::string sizes = "SymInt[" + std::to_string(dims) + "]";
  define(m, name, sizes, sizes + " padding=0", public_conv<dims, c10::SymIntArrayRef>);
  define(m, name + ".padding", sizes, "str padding=\"valid\"", public_conv<dims, std::string_view>);
}

}  // namespace

at::Tensor activate(const at::Tensor& before, ConvActivation activation) {
  switch (activation) {
    case ConvActivation::kRelu: return at::relu(before);
    case ConvActivation::kSilu: return at::silu(before);
    case ConvActivation::kGelu: return at::gelu(before);
    case ConvActivation::kGeluTanh: return at::gelu(before, "tanh");
    default: return before;
  }
}

at::MemoryFormat channels_last(const at::Tensor& tensor) {
  return tensor.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

SymInts conv_output_sizes(const Conv& args) {
  const size_t dims = args.stride.size();
  SymInts sizes{args.input.sym_size(0), args.weight.sym_size(0)};
  for (size_t dim = 0; dim < dims; ++dim) {
    const auto index = static_cast<int64_t>(dim) + kChannelDims;
    const c10::SymInt reach = args.dilation[dim] * (args.weight.sym_size(index) - 1) + 1;
    const c10::SymInt room =
        args.input.sym_size(index) + args.padding[dim] + args.padding[dims + dim] - reach;
    sizes.push_back(room / args.stride[dim] + 1);
  }
  return sizes;
}

void check_conv(const Conv& args) {
  const auto &input = args.input, &weight = args.weight;
  const char* op = "cudnn_ops.conv";
  TORCH_CHECK_TYPE(input.is_floating_point() && weight.scalar_type() == input.scalar_type(), op,
                   ": input and weight must be of one dtype, float16, bfloat16 or float32 (float64 "
                   "too on a CPU); got ",
                   input.scalar_type(), " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.device() == input.device(), op, ": weight must be on ", input.device(),
                    ", got ", weight.device());
  TORCH_CHECK_VALUE(args.groups > 0 && weight.sym_size(0) % args.groups == 0 &&
                        input.sym_size(1) == weight.sym_size(1) * args.groups,
                    op, ": weight ", weight.sym_sizes(), " with ", args.groups,
                    " groups does not fit an input of ", input.sym_size(1), " channels");
  for (size_t dim = 0; dim < args.stride.size(); ++dim) {
    TORCH_CHECK_VALUE(args.stride[dim] > 0 && args.dilation[dim] > 0, op,
                      ": stride and dilation must be positive");
    TORCH_CHECK_VALUE(args.padding[dim] >= 0 && args.padding[args.stride.size() + dim] >= 0, op,
                      ": padding must not be negative");
  }
  const auto sizes = conv_output_sizes(args);
  for (size_t dim = kChannelDims; dim < sizes.size(); ++dim) {
    TORCH_CHECK_VALUE(sizes[dim] > 0, op, ": a kernel ", weight.sym_sizes(),
                      " is larger than the padded input ", input.sym_sizes());
  }
  if (args.bias) {
    TORCH_CHECK_VALUE(args.bias->dim() == 1 && args.bias->sym_size(0) == weight.sym_size(0) &&
                          args.bias->scalar_type() == input.scalar_type() &&
                          args.bias->device() == input.device(),
                      op, ": bias must be [", weight.sym_size(0), "], ", input.scalar_type(),
                      " on ", input.device(), "; got ", args.bias->sym_sizes(), ", ",
                      args.bias->scalar_type(), " on ", args.bias->device());
  }
  if (args.residual) {
    TORCH_CHECK_VALUE(args.residual->sym_sizes() == c10::SymIntArrayRef(sizes) &&
                          args.residual->scalar_type() == input.scalar_type() &&
                          args.residual->device() == input.device(),
                      op, ": residual must be like the output, ", c10::SymIntArrayRef(sizes), ", ",
                      input.scalar_type(), " on ", input.device(), "; got ",
                      args.residual->sym_sizes(), ", ", args.residual->scalar_type(), " on ",
                      args.residual->device());
  }
}

const c10::TypedOperatorHandle<ConvOp>& conv_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("cudnn_ops::_conv", "").typed<ConvOp>();
  return op;
}

const c10::TypedOperatorHandle<ConvBackwardOp>& conv_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_ops::_conv_backward", "")
                             .typed<ConvBackwardOp>();
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  define_dims<1>(m, "conv1d");
  define_dims<2>(m, "conv2d");
  define_dims<3>(m, "conv3d");
  const std::string numbers = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups";
  const std::string geometry = numbers + ", int activation";
  const std::string tensors = "(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, ";
  m.def(
      ("_conv" + tensors + geometry + ", bool with_before) -> (Tensor out, Tensor before)").c_str(),
      tags);
  m.def(("_conv_backward(Tensor grad_out, Tensor input, Tensor weight, Tensor? saved, " + geometry +
         ", bool[4] output_mask) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, "
         "Tensor grad_residual)")
            .c_str(),
        tags);
  m.def(("_conv_size" + tensors + numbers + ") -> SymInt[]").c_str(), conv_size, tags);
}
