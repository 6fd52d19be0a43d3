// What attention's graphs are put together with: the uids of their tensors, and masks. Only
// *_graph.cpp include it, as it includes the frontend.
#pragma once

#include "ops/attention/attention_params.h"

#include "graph/frontend.h"

#include <cudnn_frontend/utils/attn_score_modifiers.h>

#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>

namespace cudnn_ops::attention_graph {

namespace fe = cudnn_frontend;
namespace modifiers = fe::graph::attn::score_modifiers;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using fe::PointwiseMode_t;

// Plans are given addresses in ascending uid order: the order of SdpaPointers.
enum Uid : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kScale,
  kSoftcap,
  kBias,
  kAlibi,
  kSinks,
  kSeed,
  kOffset,
  kOut,
  kLse,
  kGradOut,
  kGradQuery,
  kGradKey,
  kGradValue,
  kGradBias,
  kOffsets,                          // of kQuery; of tensor t at kOffsets + t - kQuery
  kLengths = kOffsets + kGradValue,  // of the queries
  kLengthsKv,
  kPageTable,
  kDescaleQuery,
  kDescaleKey,
  kDescaleValue,
  kDescaleProbabilities,
  kScaleProbabilities,
  kScaleOut,
  kAmaxProbabilities,
  kAmaxOut,
  kDescaleOut,
  kDescaleGradOut,
  kDescaleGradScores,
  kScaleGradScores,
  kScaleGradQuery,
  kScaleGradKey,
  kScaleGradValue,
  kAmaxGradScores,
  kAmaxGradQuery,
  kAmaxGradKey,
  kAmaxGradValue,
};

// [B, Hq, Sq, 1], dense: before 9.26 cuDNN reads its "stats" with these strides and no others,
// dimensions of size 1 included. Packed: the tokens of a head side by side.
inline graph::TensorDesc lse_desc(const graph::TensorDesc& query, int64_t stride) {
  const int64_t heads = query.sizes[1];
  const int64_t length = query.sizes[2];
  graph::TensorDesc desc(c10::ScalarType::Float, {query.sizes[0], heads, length, 1}, {0, 0, 0, 1});
  const int64_t head = stride == 0 ? length : stride;
  desc.strides = {heads * head, head, 1, 1};
  return desc;
}

inline fe::graph::Pointwise_attributes named(const char* name, PointwiseMode_t mode) {
  return fe::graph::Pointwise_attributes().set_name(name).set_mode(mode);
}

inline fe::DiagonalAlignment_t alignment(const SdpaMask& mask) {
  return mask.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                           : fe::DiagonalAlignment_t::TOP_LEFT;
}

// cuDNN counts the diagonal to the left side.
inline std::optional<int64_t> left_bound(const SdpaMask& mask) {
  return mask.left == kUnbounded ? std::nullopt : std::optional<int64_t>(mask.left + 1);
}

inline std::optional<int64_t> right_bound(const SdpaMask& mask) {
  return mask.right == kUnbounded ? std::nullopt : std::optional<int64_t>(mask.right);
}

// What stands between scores and softmax where the frontend's own attributes do not say it all.
// The frontend then refuses its own masks, so this makes them too.
// It is called when the graph is built, long after the graph was put together.
struct Modifier {
  SdpaMask mask;
  int64_t length = 0, length_kv = 0;
  Tensor softcap, alibi, lengths, lengths_kv;
  modifiers::Softcap cap;

  Tensor forward(const std::shared_ptr<fe::graph::Graph>& graph, Tensor scores) {
    if (softcap) scores = cap.forward(graph, scores, softcap);
    if (alibi) scores = with_alibi(*graph, scores);
    if (lengths) scores = modifiers::padding_mask(graph, scores, lengths_kv, lengths);
    if (mask.left != kUnbounded || mask.right != kUnbounded) {
      scores =
          modifiers::sliding_window_mask(graph, scores, alignment(mask), left_bound(mask),
                                         right_bound(mask), length, length_kv, lengths, lengths_kv);
    }
    return scores;
  }
  Tensor backward(const std::shared_ptr<fe::graph::Graph>& graph, const Tensor& grad) {
    return softcap ? cap.backward(graph, grad, softcap) : grad;
  }

 private:
  // Less the slope times how far the key lies from the diagonal, of a plan that is told no lengths
  // (has_slopes_in_bias).
  Tensor with_alibi(fe::graph::Graph& graph, const Tensor& scores) const {
    const auto index = [&](const char* name, int64_t axis) {
      const auto result =
          graph.pointwise(scores, named(name, PointwiseMode_t::GEN_INDEX)
                                      .set_axis(axis)
                                      .set_compute_data_type(fe::DataType_t::INT32));
      result->set_data_type(fe::DataType_t::INT32);
      return result;
    };
    auto distance = graph.pointwise(index("alibi_key", 3), index("alibi_query", 2),
                                    named("alibi_distance", PointwiseMode_t::SUB));
    if (mask.bottom_right) {
      const auto shift =
          std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(length_kv - length));
      distance = graph.pointwise(distance, shift, named("alibi_shifted", PointwiseMode_t::SUB));
    }
    const auto absolute = graph.pointwise(distance, named("alibi_absolute", PointwiseMode_t::ABS));
    const auto bias = graph.pointwise(absolute, alibi, named("alibi", PointwiseMode_t::MUL));
    return graph.pointwise(scores, bias, named("alibi_sub", PointwiseMode_t::SUB));
  }
};

// One graph as it is put together: its tensors, and the mask, which is the same in both directions.
template <class Attributes>
class Builder {
 public:
  template <class Params>
  Builder(const Params& params, int64_t length_kv, const graph::Target& target)
      : graph_(graph::new_graph(target, params.query.dtype)),
        query_(params.query),
        mask_(params.mask),
        length_kv_(length_kv) {
  }

  // An input, or the result of a node, as `desc` says; a ragged plan is told where its sequences
  // begin. Keys and queries may differ in length, so every tensor has offsets of its own.
  Tensor input(const char* name, int64_t uid, const graph::TensorDesc& desc) {
    const auto tensor = graph::input(*graph_, name, uid, desc);
    if (mask_.sequences == Sequences::kRagged) add_offsets(tensor, uid);
    return tensor;
  }
  void output(const Tensor& tensor, int64_t uid, const graph::TensorDesc& desc) {
    graph::output(tensor, uid, desc);
    if (mask_.sequences == Sequences::kRagged) add_offsets(tensor, uid);
  }
  Tensor lse_input(int64_t stride) {
    const auto lse = graph::input(*graph_, "lse", kLse, lse_desc(query_, stride));
    if (stride != 0) add_offsets(lse, kLse);
    return lse;
  }
  void lse_output(const Tensor& lse, int64_t stride) {
    graph::output(lse, kLse, lse_desc(query_, stride));
    if (stride != 0) add_offsets(lse, kLse);
  }

  void set_mask(Attributes& attributes) {
    attributes.set_attn_scale(graph::host_scalar(*graph_, "scale", kScale));
    if (mask_.bias.rank != 0) {
      attributes.set_bias(graph::input(*graph_, "bias", kBias, mask_.bias));
    }
    if (mask_.has_sinks) attributes.set_sink_token(per_head("sinks", kSinks));
    if (mask_.dropout_p != 0) {
      double p = 0;
      std::memcpy(&p, &mask_.dropout_p, sizeof p);
      attributes.set_dropout(static_cast<float>(p),
                             graph::index_input(*graph_, "seed", kSeed, at::kLong, 1),
                             graph::index_input(*graph_, "offset", kOffset, at::kLong, 1));
    }
    Tensor lengths, lengths_kv;
    if (mask_.sequences != Sequences::kFull) {
      const int64_t batch = query_.sizes[0];
      lengths = graph::index_input(*graph_, "seq_len_q", kLengths, at::kInt, batch);
      lengths_kv = graph::index_input(*graph_, "seq_len_kv", kLengthsKv, at::kInt, batch);
      attributes.set_seq_len_q(lengths).set_seq_len_kv(lengths_kv);
    }
    // FP8 attention's backward has none of these, and the frontend no modifiers for it.
    if constexpr (!std::is_same_v<Attributes, fe::graph::SDPA_fp8_backward_attributes>) {
      // The frontend lets nothing stand beside the bottom right alignment of its own.
      const bool beside = mask_.bottom_right && (mask_.bias.rank != 0 || mask_.dropout_p != 0);
      if (mask_.has_softcap || mask_.has_alibi || beside) {
        set_modifier(attributes, lengths, lengths_kv);
        return;
      }
    }
    attributes.set_padding_mask(lengths != nullptr).set_diagonal_alignment(alignment(mask_));
    if (const auto left = left_bound(mask_)) {
      attributes.set_diagonal_band_left_bound(static_cast<int>(*left));
    }
    if (const auto right = right_bound(mask_)) {
      attributes.set_diagonal_band_right_bound(static_cast<int>(*right));
    }
  }

  const std::shared_ptr<graph::FrontendGraph>& graph() const {
    return graph_;
  }

 private:
  void set_modifier(Attributes& attributes, const Tensor& lengths, const Tensor& lengths_kv) {
    const auto modifier = std::make_shared<Modifier>();
    modifier->mask = mask_;
    modifier->length = query_.sizes[2];
    modifier->length_kv = length_kv_;
    modifier->lengths = lengths;
    modifier->lengths_kv = lengths_kv;
    if (mask_.has_softcap) modifier->softcap = graph::host_scalar(*graph_, "softcap", kSoftcap);
    if (mask_.has_alibi) modifier->alibi = per_head("alibi_slopes", kAlibi);
    attributes.set_score_mod(
        [modifier](const std::shared_ptr<fe::graph::Graph>& graph, Tensor scores) {
          return modifier->forward(graph, scores);
        });
    if constexpr (std::is_same_v<Attributes, fe::graph::SDPA_backward_attributes>) {
      attributes.set_score_mod_bprop(
          [modifier](const std::shared_ptr<fe::graph::Graph>& graph, Tensor grad) {
            return modifier->backward(graph, grad);
          });
    }
  }
  Tensor per_head(const char* name, int64_t uid) {
    const int64_t heads = query_.sizes[1];
    graph::TensorDesc desc(c10::ScalarType::Float, {1, heads, 1, 1}, {heads, 1, 1, 1});
    desc.strides = {heads, 1, 1, 1};
    return graph::input(*graph_, name, uid, desc);
  }
  void add_offsets(const Tensor& tensor, int64_t uid) {
    tensor->set_ragged_offset(graph::index_input(*graph_, "offsets", kOffsets + uid - kQuery,
                                                 at::kLong, query_.sizes[0] + 1));
  }

  std::shared_ptr<graph::FrontendGraph> graph_;
  const graph::TensorDesc& query_;
  const SdpaMask& mask_;
  int64_t length_kv_;
};

}  // namespace cudnn_ops::attention_graph
