// Transposed convolutions with their epilogue: schemas, checks, and the public operators, which
// call that of convolutions (conv.cpp).

#include "ops/conv/conv_transpose.h"
#include "ops/activation.h"

#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kChannelDims = 2;  // batch and channels come first

using Numbers = c10::IntArrayRef;

// What the public operators are given, for all dimensions.
struct Given {
  Numbers stride, padding, output_padding, dilation;
};

ConvGeometry geometry_of(int64_t dims, const Given& given, int64_t groups) {
  const auto count = static_cast<size_t>(dims);
  ConvGeometry geometry;
  const auto append = [&](Numbers numbers, const char* name) {
    TORCH_CHECK_VALUE(numbers.size() == 1 || numbers.size() == count, transpose_name(dims), ": ",
                      name, " must have 1 or ", dims, " numbers, got ", numbers);
    for (size_t dim = 0; dim < count; ++dim) {
      geometry.numbers.push_back(numbers.size() == 1 ? numbers[0] : numbers[dim]);
    }
  };
  append(given.output_padding, "output_padding");
  append(given.stride, "stride");
  append(given.padding, "padding");
  append(given.padding, "padding");
  append(given.dilation, "dilation");
  geometry.numbers.push_back(groups);
  return geometry;
}

template <int64_t dims>
at::Tensor public_conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                                 const OptionalTensor& bias, Numbers stride, Numbers padding,
                                 Numbers output_padding, int64_t groups, Numbers dilation,
                                 std::string_view activation, const OptionalTensor& residual) {
  const char* op = transpose_name(dims);
  TORCH_CHECK_VALUE((input.dim() == dims + kChannelDims || input.dim() == dims + 1) &&
                        weight.dim() == dims + kChannelDims,
                    op, ": input must have ", dims + kChannelDims, " dimensions (", dims + 1,
                    " without a batch) and weight ", dims + kChannelDims, "; got ", input.dim(),
                    " and ", weight.dim());
  const auto geometry = geometry_of(dims, {stride, padding, output_padding, dilation}, groups);
  const auto kind = static_cast<int64_t>(activation_of(activation, op));
  const auto call = [&](const at::Tensor& batch, const OptionalTensor& other) {
    return conv(*Borrowed<Conv>(batch, weight, bias, other, geometry.numbers, kind));
  };
  if (input.dim() == dims + kChannelDims) return call(input, residual);
  return call(input.unsqueeze(0), residual ? residual->unsqueeze(0) : residual).squeeze(0);
}

}  // namespace

// `numbers`: how many strides, paddings, output paddings and dilations there are, then these, then
// the groups. The schema's name for them is what torch says of one that is no whole number.
template <int64_t dims>
at::Tensor packed_conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                                 const OptionalTensor& bias, Numbers numbers,
                                 std::string_view activation, const OptionalTensor& residual) {
  constexpr size_t kCounts = 4;
  std::array<Numbers, kCounts> lists;
  size_t start = kCounts;
  bool fits = numbers.size() > kCounts;
  for (size_t i = 0; fits && i < kCounts; ++i) {
    fits = numbers[i] >= 0 && static_cast<size_t>(numbers[i]) < numbers.size() - start;
    if (!fits) break;
    const auto count = static_cast<size_t>(numbers[i]);
    lists[i] = numbers.slice(start, count);
    start += count;
  }
  TORCH_CHECK_VALUE(fits && start + 1 == numbers.size(), transpose_name(dims), ": ", numbers,
                    " are not the numbers of a transposed convolution");
  const auto& [stride, padding, output_padding, dilation] = lists;
  return public_conv_transpose<dims>(input, weight, bias, stride, padding, output_padding,
                                     numbers.back(), dilation, activation, residual);
}

namespace {

std::vector<int64_t> conv_transpose_geometry(int64_t dims, Numbers stride, Numbers padding,
                                             Numbers output_padding, Numbers dilation,
                                             int64_t groups) {
  const auto geometry = geometry_of(dims, {stride, padding, output_padding, dilation}, groups);
  return {geometry.numbers.begin(), geometry.numbers.end()};
}

template <int64_t dims>
void define_dims(torch::Library& m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const std::string name = "conv_transpose" + std::to_string(dims) + "d";
  const std::string some = "int[" + std::to_string(dims) + "]";
  const std::string tensors = "(Tensor input, Tensor weight, Tensor? bias";
  const std::string epilogue = "str activation=\"none\", Tensor? residual=None) -> Tensor";
  m.def((name + tensors + "=None, " + some + " stride=1, " + some + " padding=0, " + some +
         " output_padding=0, int groups=1, " + some + " dilation=1, " + epilogue)
            .c_str(),
        public_conv_transpose<dims>, tags);
  m.def(
      ("_" + name + tensors + ", int[] stride_padding_output_padding_dilation_groups, " + epilogue)
          .c_str(),
      packed_conv_transpose<dims>, tags);
}

c10::SymInt output_size(const Conv& args, size_t dim) {
  const auto index = static_cast<int64_t>(dim) + kChannelDims;
  const auto& geometry = args.geometry;
  return (args.input.sym_size(index) - 1) * geometry.stride(dim) - geometry.before(dim) -
         geometry.after(dim) + geometry.dilation(dim) * (args.weight.sym_size(index) - 1) +
         geometry.output_padding(dim) + 1;
}

}  // namespace

const char* transpose_name(int64_t dims) {
  constexpr const char* kNames[3] = {"cudnn_ops.conv_transpose1d", "cudnn_ops.conv_transpose2d",
                                     "cudnn_ops.conv_transpose3d"};
  return kNames[dims - 1];
}

at::SymDimVector conv_transpose_output_sizes(const Conv& args) {
  at::SymDimVector sizes{args.input.sym_size(0), args.out_channels()};
  for (size_t dim = 0; dim < args.dims(); ++dim) sizes.push_back(output_size(args, dim));
  return sizes;
}

void check_transposed_fit(const Conv& args) {
  const auto &input = args.input, &weight = args.weight;
  const int64_t groups = args.geometry.groups();
  TORCH_CHECK_VALUE(
      groups > 0 && weight.sym_size(0) % groups == 0 && input.sym_size(1) == weight.sym_size(0),
      args.op(), ": weight ", weight.sym_sizes(), " with ", groups,
      " groups does not fit an input ", input.sym_sizes(),
      ": its first dimension is the input's channels");
  TORCH_CHECK_VALUE(weight.sym_size(0) > 0 && weight.sym_size(1) > 0, args.op(),
                    ": weight must have an input and an output channel, got ", weight.sym_sizes());
}

void check_transposed_size(const Conv& args, size_t dim) {
  const auto& geometry = args.geometry;
  const int64_t extra = geometry.output_padding(dim), stride = geometry.stride(dim);
  const int64_t dilation = geometry.dilation(dim);
  TORCH_CHECK_VALUE(geometry.before(dim) == geometry.after(dim), args.op(),
                    ": padding must be the same on both sides");
  TORCH_CHECK_VALUE(extra >= 0 && extra < std::max(stride, dilation), args.op(),
                    ": output_padding must be at least 0, and less than the stride or the "
                    "dilation; got ",
                    extra, " with stride ", stride, " and dilation ", dilation);
  TORCH_CHECK_VALUE(output_size(args, dim) > 0, args.op(), ": of an input ", args.input.sym_sizes(),
                    " and a weight ", args.weight.sym_sizes(), " a padding of ",
                    geometry.before(dim), " leaves no output");
}

Conv mirror_of(const Conv& args, const at::Tensor& output) {
  const auto& numbers = args.geometry.numbers;
  Conv mirror{output, args.weight, /*bias=*/{}, /*residual=*/{}, {}};
  mirror.geometry.numbers.append(numbers.begin() + static_cast<int64_t>(args.dims()),
                                 numbers.end());
  return mirror;
}

Conv mirror_of(const Conv& args) {
  at::DimVector sizes;
  for (const auto& size : conv_output_sizes(args)) sizes.push_back(size.expect_int());
  at::Tensor output = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, args.input.device()),
                   /*allocator=*/nullptr, /*resizable=*/false),
      args.input.key_set(), args.input.dtype());
  // Results have their channels last, with one dimension too.
  at::DimVector strides(sizes.size(), 1);
  int64_t stride = sizes[1];
  for (size_t dim = sizes.size() - 1; dim >= 2; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  strides[0] = stride;
  output.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return mirror_of(args, output);
}

bool has_no_mirror(const Conv& args) {
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    if (args.geometry.output_padding(dim) >= args.geometry.stride(dim)) return true;
  }
  return false;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  define_dims<1>(m);
  define_dims<2>(m);
  define_dims<3>(m);
  m.def(
      "_conv_transpose_geometry(int dims, int[] stride, int[] padding, int[] output_padding, "
      "int[] dilation, int groups) -> int[]",
      conv_transpose_geometry);
}
