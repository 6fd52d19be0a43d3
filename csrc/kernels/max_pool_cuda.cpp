#include "kernels/max_pool.h"

#include "kernels/device_kernel.h"
#include "kernels/max_pool_call.h"
#include "max_pool_images.h"

#include <algorithm>
#include <string>

namespace cudnn_ops {
namespace {

using max_pool_images::kThreads;

// Of a pixel that a block has: a line of the cache.
constexpr int64_t kMostPieces = 8;
constexpr int64_t kPieceBytes = 16;

// The kernels of max_pool.cu that have a size of windows, for a type and a width of pieces.
class Kernel {
 public:
  Kernel(const std::string& windows, const std::string& suffix)
      : names_{name(windows, "half_1", suffix),     name(windows, "half_8", suffix),
               name(windows, "bfloat16_1", suffix), name(windows, "bfloat16_8", suffix),
               name(windows, "float_1", suffix),    name(windows, "float_4", suffix)},
        kernels_{
            {kMaxPoolImages, names_[0].c_str(), true}, {kMaxPoolImages, names_[1].c_str(), true},
            {kMaxPoolImages, names_[2].c_str(), true}, {kMaxPoolImages, names_[3].c_str(), true},
            {kMaxPoolImages, names_[4].c_str(), true}, {kMaxPoolImages, names_[5].c_str(), true}} {
  }
  const DeviceKernel& of(const at::Tensor& image, bool is_wide) const {
    return kernels_[2 * type_index(image.scalar_type()) + (is_wide ? 1 : 0)];
  }

 private:
  static std::string name(const std::string& windows, const char* type, const std::string& suffix) {
    return "max_pool_" + windows + "_" + type + suffix;
  }

  std::string names_[6];
  DeviceKernel kernels_[6];
};

// Which kernel a call needs: 0 for any windows, or the size of those with a stride of 2.
int kernel_size(const MaxPoolWindows& windows) {
  const auto& [kernel, stride, padding, dilation] = windows;
  const bool is_known = kernel[0] == kernel[1] && (kernel[0] == 2 || kernel[0] == 3) &&
                        stride[0] == 2 && stride[1] == 2 && dilation[0] == 1 && dilation[1] == 1;
  return is_known ? static_cast<int>(kernel[0]) : 0;
}

int64_t power_of_two_from(int64_t number) {
  int64_t power = 1;
  while (power < number) power *= 2;
  return power;
}

// Images as the kernels see them, and how they lie before the blocks.
struct Spread {
  MaxPoolShape shape{};
  int64_t samples;
  bool is_wide;
  int64_t blocks = 0;
  int threads = 0;

  Spread(const at::Tensor& image, const at::Tensor& out, bool is_last,
         const MaxPoolWindows& windows) {
    const int64_t channels = is_last ? image.size(1) : 1;
    const int64_t width = kPieceBytes / image.element_size();
    samples = is_last ? image.size(0) : image.size(0) * image.size(1);
    is_wide = channels % width == 0;
    shape.pieces = static_cast<int>(is_wide ? channels / width : channels);
    auto& geometry = shape.geometry;
    for (int dim = 0; dim < 2; ++dim) {
      shape.size[dim] = static_cast<int>(image.size(2 + dim));
      shape.out_size[dim] = static_cast<int>(out.size(2 + dim));
      geometry.kernel[dim] = static_cast<int>(windows.kernel[dim]);
      geometry.stride[dim] = static_cast<int>(windows.stride[dim]);
      geometry.padding[dim] = static_cast<int>(windows.padding[dim]);
      geometry.dilation[dim] = static_cast<int>(windows.dilation[dim]);
    }
  }

  // The work: so many rows and columns of each image.
  void over(int64_t rows, int64_t columns) {
    const int64_t most = is_wide ? kMostPieces : 4 * kMostPieces;
    const int64_t strips = divide_up(shape.pieces, most);
    const int64_t pieces = divide_up(shape.pieces, strips);
    const int64_t pixels = kThreads / pieces;
    // A block is twice as wide as high, and no smaller than a warp of a narrow image.
    int64_t across = 1;
    while (across * across < pixels) across *= 2;
    if (pieces == 1) across = std::max<int64_t>(across, 32);
    across = std::min(across, power_of_two_from(columns));
    const int64_t down = std::min(std::max<int64_t>(pixels / across, 1), rows);
    shape.block_pieces = static_cast<unsigned>(pieces);
    shape.strips = static_cast<unsigned>(strips);
    while (int64_t{1} << shape.log2_columns < across) ++shape.log2_columns;
    shape.across = static_cast<unsigned>(divide_up(columns, across));
    shape.down = static_cast<unsigned>(divide_up(rows, down));
    threads = static_cast<int>(pieces * across * down);
    blocks = samples * shape.down * shape.across * strips;
  }
};

const Kernel& kernel_of(int size, bool is_backward) {
  static const Kernel forward[3] = {{"any", ""}, {"2x2", ""}, {"3x3", ""}};
  static const Kernel backward[3] = {
      {"any", "_backward"}, {"2x2", "_backward"}, {"3x3", "_backward"}};
  const int index = size == 0 ? 0 : size - 1;
  return (is_backward ? backward : forward)[index];
}

}  // namespace

void max_pool_forward(const at::Tensor& input, bool is_last, const MaxPoolWindows& windows,
                      const at::Tensor& out, const at::Tensor& offsets) {
  Spread spread(input, out, is_last, windows);
  spread.over(out.size(2), out.size(3));
  MaxPoolCall call{spread.shape, input.const_data_ptr(), out.mutable_data_ptr(),
                   offsets.defined() ? offsets.mutable_data_ptr() : nullptr};
  void* argument = &call;
  kernel_of(kernel_size(windows), /*is_backward=*/false)
      .of(input, spread.is_wide)
      .launch(spread.blocks, 1, spread.threads, &argument);
}

void max_pool_backward(const MaxPoolGrad& args, bool is_last, const MaxPoolWindows& windows,
                       const at::Tensor& grad_input) {
  Spread spread(grad_input, args.grad_out, is_last, windows);
  MaxPoolBackwardCall call{};
  const int size = kernel_size(windows);
  int64_t work[2] = {grad_input.size(2), grad_input.size(3)};
  for (int dim = 0; dim < 2; ++dim) {
    if (size > 0) {
      // Pairs begin at even places of what is padded.
      const int64_t first = windows.padding[dim] / 2;
      work[dim] = (windows.padding[dim] + work[dim] - 1) / 2 - first + 1;
      call.first[dim] = static_cast<int>(first);
    }
    call.taps[dim] = static_cast<int>(windows.stride[dim] / windows.dilation[dim]);
    call.rest[dim] = static_cast<int>(windows.stride[dim] % windows.dilation[dim]);
  }
  spread.over(work[0], work[1]);
  call.shape = spread.shape;
  call.grad_out = args.grad_out.const_data_ptr();
  if (args.grad_more) call.more = args.grad_more->const_data_ptr();
  call.offsets = args.offsets.const_data_ptr();
  call.grad_input = grad_input.mutable_data_ptr();
  void* argument = &call;
  kernel_of(size, /*is_backward=*/true)
      .of(grad_input, spread.is_wide)
      .launch(spread.blocks, 1, spread.threads, &argument);
}

}  // namespace cudnn_ops
