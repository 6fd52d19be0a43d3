// Convolutions with their epilogue: schemas, checks, and the public operators. These call one
// operator, which has the kernels (conv_cuda.cpp; for CPUs and fake tensors cudnn_ops/ops/conv.py)
// and the derivative (conv_autograd.cpp).

#include "ops/activation.h"
#include "ops/autocast.h"
#include "ops/backward_check.h"
#include "ops/conv/conv_transpose.h"

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kChannelDims = 2;  // batch and channels come first

using Numbers = c10::IntArrayRef;

const char* name_of(int64_t dims) {
  constexpr const char* kNames[3] = {"cudnn_ops.conv1d", "cudnn_ops.conv2d", "cudnn_ops.conv3d"};
  return kNames[dims - 1];
}

// What the public operators are given, for all dimensions. `Padding`: numbers, or a name.
template <class Padding>
ConvGeometry geometry_of(int64_t dims, const at::Tensor& weight, Numbers stride, Padding padding,
                         Numbers dilation, int64_t groups) {
  const char* op = name_of(dims);
  const auto check = [&](Numbers numbers, const char* name) {
    TORCH_CHECK_VALUE(numbers.size() == 1 || static_cast<int64_t>(numbers.size()) == dims, op, ": ",
                      name, " must have 1 or ", dims, " numbers, got ", numbers);
  };
  const auto of_dim = [](Numbers numbers, size_t dim) {
    return numbers.size() == 1 ? numbers[0] : numbers[dim];
  };
  check(stride, "stride");
  check(dilation, "dilation");
  const auto count = static_cast<size_t>(dims);
  ConvGeometry geometry;
  geometry.numbers.assign(4 * count + 1, 0);
  int64_t* const strides = geometry.numbers.data();
  int64_t *const before = strides + count, *const after = before + count;
  int64_t* const dilations = after + count;
  for (size_t dim = 0; dim < count; ++dim) {
    strides[dim] = of_dim(stride, dim);
    dilations[dim] = of_dim(dilation, dim);
  }
  geometry.numbers.back() = groups;
  if constexpr (std::is_same_v<Padding, Numbers>) {
    check(padding, "padding");
    for (size_t dim = 0; dim < count; ++dim) before[dim] = after[dim] = of_dim(padding, dim);
  } else {
    TORCH_CHECK_VALUE(padding == "same" || padding == "valid", op,
                      ": padding must be whole numbers, \"same\" or \"valid\", got \"", padding,
                      "\"");
    for (size_t dim = 0; padding == "same" && dim < count; ++dim) {
      TORCH_CHECK_VALUE(of_dim(stride, dim) == 1, op, ": padding \"same\" needs a stride of 1");
      const int64_t size =
          weight.sym_size(static_cast<int64_t>(dim) + kChannelDims).guard_int(__FILE__, __LINE__);
      const int64_t total = of_dim(dilation, dim) * (size - 1);
      before[dim] = total / 2;
      after[dim] = total - total / 2;
    }
  }
  return geometry;
}

// Whether the kernel's positions tile an image of few channels, as a vision transformer's patches
// do: cuDNN has no good engine for that, and a matrix product of the patches is fast.
bool is_of_patches(const Conv& args) {
  const auto& geometry = args.geometry;
  constexpr int64_t kMostChannels = 4;
  const auto channels = args.input.sym_size(1).maybe_as_int();
  if (!args.input.is_cuda() || args.dims() == 1 || !channels || *channels > kMostChannels ||
      geometry.groups() != 1 || geometry.is_transposed()) {
    return false;
  }
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    if (geometry.stride(dim) == 1 || geometry.dilation(dim) != 1 || geometry.before(dim) != 0 ||
        geometry.after(dim) != 0 ||
        args.weight.sym_size(static_cast<int64_t>(dim) + kChannelDims) != geometry.stride(dim)) {
      return false;
    }
  }
  return true;
}

// Calls torch's operators, which have derivatives.
at::Tensor conv_of_patches(const Conv& args) {
  check_conv(args);
  const auto dims = static_cast<int64_t>(args.dims());
  const auto sizes = conv_output_sizes(args);
  at::Tensor x = args.input;
  std::vector<c10::SymInt> split{sizes[0], args.input.sym_size(1)};
  std::vector<int64_t> order{0}, within{1}, back{0, dims + 1};
  for (int64_t dim = 0; dim < dims; ++dim) {
    const int64_t index = dim + kChannelDims;
    const auto& count = sizes[static_cast<size_t>(index)];
    const int64_t size = args.geometry.stride(static_cast<size_t>(dim));
    x = x.narrow_symint(index, 0, count * size);
    split.push_back(count);
    split.emplace_back(size);
    order.push_back(2 * dim + 2);
    within.push_back(2 * dim + 3);
    back.push_back(dim + 1);
  }
  order.insert(order.end(), within.begin(), within.end());
  std::vector<c10::SymInt> rows{sizes[0]};
  rows.insert(rows.end(), sizes.begin() + kChannelDims, sizes.end());
  rows.emplace_back(-1);
  const at::Tensor patches = x.reshape_symint(split).permute(order).reshape_symint(rows);
  at::Tensor out = at::linear(patches, args.weight.flatten(1), args.bias).permute(back);
  if (args.residual) out = at::add(out, *args.residual);
  return activate(out, args.kind());
}

// `padding` as numbers or as a name.
template <int64_t dims, class Padding>
at::Tensor public_conv(const at::Tensor& input, const at::Tensor& weight,
                       const OptionalTensor& bias, Numbers stride, Padding padding,
                       Numbers dilation, int64_t groups, std::string_view activation,
                       const OptionalTensor& residual) {
  const char* op = name_of(dims);
  TORCH_CHECK_VALUE((input.dim() == dims + kChannelDims || input.dim() == dims + 1) &&
                        weight.dim() == dims + kChannelDims,
                    op, ": input must have ", dims + kChannelDims, " dimensions (", dims + 1,
                    " without a batch) and weight ", dims + kChannelDims, "; got ", input.dim(),
                    " and ", weight.dim());
  const auto geometry = geometry_of(dims, weight, stride, padding, dilation, groups);
  const auto kind = static_cast<int64_t>(activation_of(activation, op));
  const auto call = [&](const at::Tensor& batch, const OptionalTensor& other) {
    return conv(*Borrowed<Conv>(batch, weight, bias, other, geometry.numbers, kind));
  };
  if (input.dim() == dims + kChannelDims) return call(input, residual);
  return call(input.unsqueeze(0), residual ? residual->unsqueeze(0) : residual).squeeze(0);
}

}  // namespace

// `numbers`: how many strides, paddings and dilations there are, then these, then the groups. The
// schema's name for them is what torch says of one that is no whole number.
template <int64_t dims>
at::Tensor packed_conv(const at::Tensor& input, const at::Tensor& weight,
                       const OptionalTensor& bias, Numbers numbers, std::string_view activation,
                       const OptionalTensor& residual) {
  constexpr int64_t kCounts = 3;
  int64_t expected = kCounts + 1;
  for (int64_t i = 0; i < kCounts && i < static_cast<int64_t>(numbers.size()); ++i) {
    TORCH_CHECK_VALUE(numbers[i] >= 0, name_of(dims), ": a count is negative in ", numbers);
    expected += numbers[i];
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(numbers.size()) == expected, name_of(dims), ": ", numbers,
                    " are not the numbers of a convolution");
  const auto stride = numbers.slice(kCounts, numbers[0]);
  const auto padding = numbers.slice(kCounts + numbers[0], numbers[1]);
  const auto dilation = numbers.slice(kCounts + numbers[0] + numbers[1], numbers[2]);
  return public_conv<dims, Numbers>(input, weight, bias, stride, padding, dilation, numbers.back(),
                                    activation, residual);
}

namespace {

template <class Padding>
std::vector<int64_t> conv_geometry(int64_t dims, const at::Tensor& weight, Numbers stride,
                                   Padding padding, Numbers dilation, int64_t groups) {
  const auto geometry = geometry_of(dims, weight, stride, padding, dilation, groups);
  return {geometry.numbers.begin(), geometry.numbers.end()};
}

// The sizes of the result, checked.
std::vector<c10::SymInt> conv_size(const at::Tensor& input, const at::Tensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& residual,
                                   Numbers geometry) {
  const Conv args{input, weight, bias, residual, {ConvNumbers(geometry)}};
  check_conv(args);
  const auto sizes = conv_output_sizes(args);
  return {sizes.begin(), sizes.end()};
}

template <int64_t dims>
void define_dims(torch::Library& m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const std::string name = "conv" + std::to_string(dims) + "d";
  const std::string some = "int[" + std::to_string(dims) + "]";
  const std::string tensors = "(Tensor input, Tensor weight, Tensor? bias";
  const std::string epilogue = "str activation=\"none\", Tensor? residual=None) -> Tensor";
  const auto schema = [&](const std::string& overload, const std::string& padding) {
    return name + overload + tensors + "=None, " + some + " stride=1, " + padding + ", " + some +
           " dilation=1, int groups=1, " + epilogue;
  };
  m.def(schema("", some + " padding=0").c_str(), public_conv<dims, Numbers>, tags);
  m.def(schema(".padding", "str padding=\"valid\"").c_str(), public_conv<dims, std::string_view>,
        tags);
  m.def(("_" + name + tensors + ", int[] stride_padding_dilation_groups, " + epilogue).c_str(),
        packed_conv<dims>, tags);
}

// How far the kernel moves within the padded input; negative where it does not fit.
c10::SymInt room(const Conv& args, size_t dim) {
  const auto index = static_cast<int64_t>(dim) + kChannelDims;
  const auto& geometry = args.geometry;
  return args.input.sym_size(index) + geometry.before(dim) + geometry.after(dim) -
         ((args.weight.sym_size(index) - 1) * geometry.dilation(dim) + 1);
}

// What a convolution's sizes must fulfil beside those that both kinds must.
void check_fit(const Conv& args) {
  const auto &input = args.input, &weight = args.weight;
  const int64_t groups = args.geometry.groups();
  TORCH_CHECK_VALUE(groups > 0 && weight.sym_size(0) % groups == 0 &&
                        input.sym_size(1) == weight.sym_size(1) * groups,
                    args.op(), ": weight ", weight.sym_sizes(), " with ", groups,
                    " groups does not fit an input of ", input.sym_size(1), " channels");
  TORCH_CHECK_VALUE(weight.sym_size(0) > 0, args.op(), ": weight must have an output channel, got ",
                    weight.sym_sizes());
}

}  // namespace

at::Tensor conv(const Conv& given) {
  return in_lower_precision(given, given.input, [](const Conv& args) {
    if (is_of_patches(args)) return conv_of_patches(args);
    const bool with_before =
        needs_before(args.kind()) &&
        torch::autograd::compute_requires_grad(args.input, args.weight, args.bias, args.residual);
    return std::get<0>(conv_op().call_with(args, with_before));
  });
}

Activation Conv::kind() const {
  return activation_at(activation);
}

const char* Conv::op() const {
  const auto count = static_cast<int64_t>(dims());
  return geometry.is_transposed() ? transpose_name(count) : name_of(count);
}

at::SymDimVector conv_output_sizes(const Conv& args) {
  if (args.geometry.is_transposed()) return conv_transpose_output_sizes(args);
  // As torch: without input channels there are no output channels, whatever the weight's size.
  const auto& channels =
      args.input.sym_size(1) == 0 ? args.input.sym_size(1) : args.weight.sym_size(0);
  at::SymDimVector sizes{args.input.sym_size(0), channels};
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    sizes.push_back(room(args, dim) / args.geometry.stride(dim) + 1);
  }
  return sizes;
}

void check_conv(const Conv& args) {
  args.kind();
  const auto &input = args.input, &weight = args.weight;
  const auto& geometry = args.geometry;
  TORCH_CHECK_VALUE(
      (args.dims() >= 1 && args.dims() <= 3) &&
          geometry.numbers.size() == (geometry.is_transposed() ? 5 : 4) * args.dims() + 1 &&
          static_cast<size_t>(input.dim() - kChannelDims) == args.dims() &&
          weight.dim() == input.dim(),
      "cudnn_ops.conv: an input ", input.sym_sizes(), ", a weight ", weight.sym_sizes(),
      " and a geometry ", Numbers(geometry.numbers), " do not fit");
  const char* op = args.op();
  TORCH_CHECK_TYPE(
      is_computed_in(input.scalar_type()) && weight.scalar_type() == input.scalar_type(), op,
      ": input and weight must be of one dtype, float16, bfloat16 or float32 (float64 "
      "too on a CPU); got ",
      input.scalar_type(), " and ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.device() == input.device(), op, ": weight must be on ", input.device(),
                    ", got ", weight.device());
  if (geometry.is_transposed()) {
    check_transposed_fit(args);
  } else {
    check_fit(args);
  }
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    TORCH_CHECK_VALUE(geometry.stride(dim) > 0 && geometry.dilation(dim) > 0, op,
                      ": stride and dilation must be positive");
    TORCH_CHECK_VALUE(geometry.before(dim) >= 0 && geometry.after(dim) >= 0, op,
                      ": padding must not be negative");
    const auto index = static_cast<int64_t>(dim) + kChannelDims;
    TORCH_CHECK_VALUE(weight.sym_size(index) > 0, op,
                      ": weight must not have a kernel of size 0, got ", weight.sym_sizes());
    if (geometry.is_transposed()) {
      check_transposed_size(args, dim);
    } else {
      TORCH_CHECK_VALUE(room(args, dim) >= 0, op, ": a kernel ", weight.sym_sizes(),
                        " is larger than the padded input ", input.sym_sizes());
    }
  }
  TORCH_CHECK_VALUE(input.sym_numel() != 0 || input.sym_size(0) == 0 || input.sym_size(1) == 0, op,
                    ": of an empty input the batch or the channels must be 0, got ",
                    input.sym_sizes());
  if (args.bias) {
    TORCH_CHECK_VALUE(args.bias->dim() == 1 && args.bias->sym_size(0) == args.out_channels() &&
                          args.bias->scalar_type() == input.scalar_type() &&
                          args.bias->device() == input.device(),
                      op, ": bias must be [", args.out_channels(), "], ", input.scalar_type(),
                      " on ", input.device(), "; got ", args.bias->sym_sizes(), ", ",
                      args.bias->scalar_type(), " on ", args.bias->device());
  }
  if (args.residual) {
    const auto sizes = conv_output_sizes(args);
    TORCH_CHECK_VALUE(args.residual->sym_sizes() == c10::SymIntArrayRef(sizes) &&
                          args.residual->scalar_type() == input.scalar_type() &&
                          args.residual->device() == input.device(),
                      op, ": residual must be like the output, ", c10::SymIntArrayRef(sizes), ", ",
                      input.scalar_type(), " on ", input.device(), "; got ",
                      args.residual->sym_sizes(), ", ", args.residual->scalar_type(), " on ",
                      args.residual->device());
  }
}

void check_conv_backward(const ConvBackward& args) {
  const Conv conv = args.forward.conv();
  check_conv(conv);
  const char* op = conv.op();
  const auto check = [&](const at::Tensor& tensor, const char* name) {
    const auto sizes = conv_output_sizes(conv);
    TORCH_CHECK_VALUE(tensor.sym_sizes() == c10::SymIntArrayRef(sizes) &&
                          tensor.scalar_type() == conv.input.scalar_type() &&
                          tensor.device() == conv.input.device(),
                      op, " backward: ", name, " must be like the output, ",
                      c10::SymIntArrayRef(sizes), ", ", conv.input.scalar_type(), " on ",
                      conv.input.device(), "; got ", tensor.sym_sizes(), ", ", tensor.scalar_type(),
                      " on ", tensor.device());
  };
  check(args.grad_out, "grad_out");
  if (conv.kind() == Activation::kNone) return;
  const auto& saved = args.forward.saved;
  TORCH_CHECK_VALUE(saved, op, " backward: an activation needs saved, what it was computed from");
  check(*saved, "saved");
}

const Operator<ConvResults, ConvForward>& conv_op() {
  static const Operator<ConvResults, ConvForward> op("cudnn_ops::_conv");
  return op;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  define_dims<1>(m);
  define_dims<2>(m);
  define_dims<3>(m);
  const std::string tensors =
      "(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int[] geometry";
  m.def(("_conv" + tensors + ", int activation, bool with_before) -> (Tensor out, Tensor before)")
            .c_str(),
        tags);
  m.def(
      "_conv_backward(Tensor grad_out, Tensor input, Tensor weight, Tensor? saved, int[] geometry, "
      "int activation, bool[4] output_mask) -> (Tensor grad_input, Tensor grad_weight, "
      "Tensor grad_bias, Tensor grad_residual)",
      tags);
  m.def(
      "_conv_backward_check(Tensor grad_out, Tensor input, Tensor weight, Tensor? saved, "
      "int[] geometry, int activation) -> ()",
      kernel<check_conv_backward>, tags);
  m.def(("_conv_size" + tensors + ") -> SymInt[]").c_str(), conv_size, tags);
  m.def(
      "_conv_geometry(int dims, Tensor weight, int[] stride, int[] padding, int[] dilation, "
      "int groups) -> int[]",
      conv_geometry<Numbers>, tags);
  m.def(
      "_conv_geometry.padding(int dims, Tensor weight, int[] stride, str padding, int[] dilation, "
      "int groups) -> int[]",
      conv_geometry<std::string_view>, tags);
}
