// The identity of a plan. An operator's parameters struct lists its fields once, in
//
//   static constexpr const char* kName = "sdpa";
//   template <class Visitor> void fields(Visitor&& v) const { v("causal", is_causal); ... }
//
// and that one list gives equality, hash and a printable form. Whatever is baked into a
// graph must be a field; what is passed at run time must not.
#pragma once

#include "tensor_desc.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>

namespace cudnn_ops::graph {

// Fields flattened to words: comparing and hashing touch no pointer and allocate nothing.
class PlanKey {
 public:
  template <class Params>
  static PlanKey of(const Params& params) {
    PlanKey key;
    key.append_name(Params::kName);
    params.fields(key);
    return key;
  }

  template <class T>
  void operator()(const char* /*name*/, const T& value) {
    if constexpr (std::is_same_v<T, TensorDesc>) {
      words_.push_back(static_cast<int64_t>(value.dtype) << 8 | value.rank);
      words_.append(value.sizes.data(), value.sizes.data() + value.rank);
      words_.append(value.strides.data(), value.strides.data() + value.rank);
    } else {
      static_assert(std::is_integral_v<T> || std::is_enum_v<T>, "a key holds whole numbers");
      words_.push_back(static_cast<int64_t>(value));
    }
  }

  bool operator==(const PlanKey& other) const {
    return words_.size() == other.words_.size() &&
           std::memcmp(words_.data(), other.words_.data(), words_.size() * sizeof(int64_t)) == 0;
  }

  size_t hash() const {
    uint64_t h = words_.size();
    for (const int64_t word : words_) {
      h = (h ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ull;
      h ^= h >> 32;
    }
    return h;
  }

 private:
  void append_name(const char* name) {
    int64_t word = 0;
    for (int shift = 0; *name != '\0'; ++name, shift += 8) {
      if (shift == 64) {
        words_.push_back(word);
        word = shift = 0;
      }
      word |= static_cast<int64_t>(static_cast<unsigned char>(*name)) << shift;
    }
    words_.push_back(word);
  }

  c10::SmallVector<int64_t, 96> words_;  // attention backward, eight tensors, takes 77
};

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    return key.hash();
  }
};

// "sdpa(device=0, query=bf16[...]:[...], causal=1)"
template <class Params>
std::string describe(const Params& params) {
  std::ostringstream out;
  const char* separator = "(";
  out << Params::kName;
  params.fields([&](const char* name, const auto& value) {
    out << separator << name << "=";
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, TensorDesc>) {
      out << value.str();
    } else {
      out << static_cast<int64_t>(value);
    }
    separator = ", ";
  });
  out << ")";
  return out.str();
}

}  // namespace cudnn_ops::graph
