#include "ops/attention/dense/sdpa_regular.h"
#include "ops/attention/check.h"
#include "ops/attention/layout.h"

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

bool may_be_equal(const c10::SymInt& a, const c10::SymInt& b) {
  return TORCH_GUARD_OR_TRUE(a.sym_eq(b));
}

const c10::SymInt& broadcast(const c10::SymInt& a, const c10::SymInt& b) {
  return known(a.sym_eq(1)) ? b : a;
}

// [B, H, S, D] with tokens before heads in memory stays so.
at::Tensor with_regular_rows_in_order(const at::Tensor& tensor) {
  if (has_regular_rows(tensor)) return tensor;
  const bool is_token_major = known(tensor.sym_stride(1).sym_lt(tensor.sym_stride(2)));
  if (!is_token_major) return with_regular_rows(tensor);
  return with_regular_rows(tensor.transpose(1, 2)).transpose(1, 2);
}

// [B, h, S, D] as [B, heads, S, D], each head several times side by side.
at::Tensor repeat_heads(const at::Tensor& tensor, const c10::SymInt& heads) {
  const c10::SymInt own = tensor.sym_size(1);
  if (known(own.sym_eq(heads))) return tensor;
  const std::array<c10::SymInt, 5> sizes{-1, -1, heads / own, -1, -1};
  return tensor.unsqueeze(2).expand_symint(sizes).flatten(1, 2);
}

// A dense tensor of four dimensions with nothing to it that a compiler traces.
bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.dim() != 4) return false;
  const auto* impl = tensor.unsafeGetTensorImpl();
  return !impl->has_symbolic_sizes_strides() && !impl->is_python_dispatch();
}

bool has_plain_rows(const at::Tensor& tensor) {
  const int64_t size = tensor.sizes()[3];
  return tensor.strides()[3] == 1 && size % kRowUnit == 0 && size > 0;
}

bool is_plainly_regular(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        bool enable_gqa) {
  if (!has_plain_rows(query) || !has_plain_rows(key) || !has_plain_rows(value)) return false;
  const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
  return q[0] == k[0] && q[0] == v[0] && k[1] == v[1] && (enable_gqa || q[1] == k[1]);
}

}  // namespace

bool is_regular(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                bool enable_gqa) {
  if (is_plain(query) && is_plain(key) && is_plain(value)) {
    return is_plainly_regular(query, key, value, enable_gqa);
  }
  for (const auto* tensor : {&query, &key, &value}) {
    if (!tensor->defined() || tensor->layout() != at::kStrided || tensor->dim() != 4 ||
        !has_unit_stride(*tensor) || !has_regular_size(*tensor)) {
      return false;
    }
  }
  return may_be_equal(query.sym_size(0), key.sym_size(0)) &&
         may_be_equal(query.sym_size(0), value.sym_size(0)) &&
         may_be_equal(key.sym_size(1), value.sym_size(1)) &&
         (enable_gqa || may_be_equal(query.sym_size(1), key.sym_size(1)));
}

bool fits_plainly(const Sdpa& args) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  if (!is_plain(query) || !is_plain(key) || !is_plain(value) ||
      !is_plainly_regular(query, key, value, args.enable_gqa)) {
    return false;
  }
  const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
  const bool fits_heads = k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0;
  return fits_heads && q[3] == k[3] && k[2] == v[2] && query.device() == key.device() &&
         query.device() == value.device() && query.scalar_type() == key.scalar_type() &&
         query.scalar_type() == value.scalar_type();
}

RegularSdpa::RegularSdpa(const Sdpa& given) : given_value_(given.value), args_(given) {
  check_shapes(given);
  rank_ = std::max({given.query.dim(), given.key.dim(), given.value.dim()});
  leading_.assign(static_cast<size_t>(std::max<int64_t>(rank_ - 3, 0)), 1);
  for (const auto* tensor : {&given.query, &given.key, &given.value}) {
    for (int64_t i = 4; i <= tensor->dim(); ++i) {
      auto& size = leading_[static_cast<size_t>(rank_ - i)];
      size = broadcast(size, tensor->sym_size(-i));
    }
  }
  const std::array<at::Tensor*, 3> inputs{&args_.query, &args_.key, &args_.value};
  for (auto* tensor : inputs) *tensor = batched(*tensor);
  match_heads();
  for (auto* tensor : inputs) *tensor = with_regular_rows_in_order(*tensor);
  args_.attn_mask = mask_of_batch(given.attn_mask);
  args_.scale = scale_of_rows(given.scale, given.query);
}

// [..., H, S, D] as [B, H, S, D].
at::Tensor RegularSdpa::batched(at::Tensor tensor) const {
  while (tensor.dim() < std::max<int64_t>(rank_, 4)) tensor = tensor.unsqueeze(0);
  if (leading_.empty()) return tensor;
  c10::SmallVector<c10::SymInt, 8> sizes(leading_.begin(), leading_.end());
  sizes.append(3, -1);
  tensor = tensor.expand_symint(sizes);
  return leading_.size() == 1 ? tensor : tensor.flatten(0, rank_ - 4);
}

at::Tensor RegularSdpa::unbatched(const at::Tensor& tensor) const {
  if (leading_.size() > 1) {
    c10::SmallVector<c10::SymInt, 8> sizes(leading_.begin(), leading_.end());
    for (int64_t dim = 1; dim < tensor.dim(); ++dim) sizes.push_back(tensor.sym_size(dim));
    return tensor.view_symint(sizes);
  }
  at::Tensor result = tensor;
  for (int64_t rank = rank_; rank < 4; ++rank) result = result.squeeze(0);
  return result;
}

// A mask of less than four dimensions is the same for all of the batch, as it is for the kernels.
OptionalTensor RegularSdpa::mask_of_batch(const OptionalTensor& given) const {
  if (!given || leading_.size() <= 1) return given;
  c10::SmallVector<c10::SymInt, 8> full(leading_.begin(), leading_.end());
  full.append({args_.query.sym_size(1), args_.query.sym_size(2), args_.key.sym_size(2)});
  at::Tensor mask = *given;
  check_mask(mask, args_.query, full);
  while (mask.dim() > 3 && known(mask.sym_size(0).sym_eq(1))) mask = mask.squeeze(0);
  return mask.dim() > 3 ? batched(mask) : mask;
}

void RegularSdpa::match_heads() {
  auto &query = args_.query, &key = args_.key, &value = args_.value;
  const c10::SymInt heads = query.sym_size(1), heads_key = key.sym_size(1),
                    heads_value = value.sym_size(1);
  const bool is_one_group = known(heads_key.sym_eq(heads_value));
  if (args_.enable_gqa) {
    if (is_one_group) return;
    key = repeat_heads(key, heads);
    value = repeat_heads(value, heads);
  } else if (is_one_group && known(heads_key.sym_eq(1))) {
    args_.enable_gqa = true;  // one for all: the kernels read it as it lies
  } else {
    const std::array<c10::SymInt, 4> sizes{-1, broadcast(broadcast(heads, heads_key), heads_value),
                                           -1, -1};
    for (auto* tensor : {&query, &key, &value}) *tensor = tensor->expand_symint(sizes);
  }
}

at::Tensor RegularSdpa::out(const at::Tensor& regular) const {
  if (has_regular_size(given_value_)) return unbatched(regular);
  return unbatched(regular.narrow_symint(-1, 0, given_value_.sym_size(-1)));
}

at::Tensor RegularSdpa::lse(const at::Tensor& regular) const {
  return unbatched(regular);
}

at::Tensor sdpa_as_regular(const Sdpa& given) {
  const RegularSdpa regular(given);
  return regular.out(sdpa_op().call(regular.args()));
}

OutAndLse sdpa_with_lse_as_regular(const Sdpa& given) {
  const RegularSdpa regular(given);
  const auto [out, lse] = sdpa_with_lse_op().call(regular.args());
  return {regular.out(out), regular.lse(lse)};
}

}  // namespace cudnn_ops
