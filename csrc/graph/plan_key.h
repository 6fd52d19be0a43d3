// The identity of a plan. An operator's parameters struct has a name and lists its fields once,
//
//   static constexpr const char* kName = "sdpa";
//   CUDNN_OPS_FIELDS(query, key, value, out, is_causal)
//
// and that one list gives equality, hash, a printable form, and the way back from a key to the
// parameters. A graph is built from its key and from nothing else (plan_kind.h), so what is
// not a field cannot be baked into one. A field is a tensor, a whole number or a list of three.
#pragma once

#include "graph/fields.h"
#include "graph/tensor_desc.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cudnn_ops::graph {

// Fields flattened to words: comparing and hashing touch no pointer and allocate nothing.
class PlanKey {
 public:
  // `target` is Target::id(): the same fields on another device are another plan.
  template <class Params>
  static PlanKey of(const Params& params, int64_t target) {
    PlanKey key;
    key.target_ = target;
    key.words_.push_back(name_word(Params::kName));
    std::apply([&](const auto&... field) { (key.add(field), ...); }, Params::fields(params));
    return key;
  }

  // A key whose words were read from a file or came from Python. Whether they make sense is
  // found out when they are read (KeyReader).
  PlanKey(c10::ArrayRef<int64_t> words, int64_t target) : target_(target) {
    for (const int64_t word : words) words_.push_back(word);
  }

  bool operator==(const PlanKey& other) const {
    return target_ == other.target_ && words_.size() == other.words_.size() &&
           std::memcmp(words_.data(), other.words_.data(), words_.size() * sizeof(int64_t)) == 0;
  }

  size_t hash() const {
    uint64_t h = words_.size() ^ static_cast<uint64_t>(target_) << 32;
    for (const int64_t word : words_) {
      h = (h ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ull;
      h ^= h >> 32;
    }
    return h;
  }

  // The first word stands for the parameters' kName, the others are the fields.
  c10::ArrayRef<int64_t> words() const {
    return words_;
  }
  int64_t target() const {
    return target_;
  }

  // FNV-1a.
  static constexpr int64_t name_word(const char* name) {
    uint64_t h = 0xCBF29CE484222325ull;
    for (; *name != '\0'; ++name) h = (h ^ static_cast<unsigned char>(*name)) * 0x100000001B3ull;
    return static_cast<int64_t>(h);
  }

 private:
  PlanKey() = default;

  void add(const TensorDesc& tensor) {
    words_.push_back(static_cast<int64_t>(tensor.dtype) << 8 | tensor.rank);
    words_.append(tensor.sizes.data(), tensor.sizes.data() + tensor.rank);
    words_.append(tensor.strides.data(), tensor.strides.data() + tensor.rank);
  }
  void add(const std::array<int64_t, 3>& list) {
    words_.append(list.begin(), list.end());
  }
  template <class T>
  void add(const T& number) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>, "a key holds whole numbers");
    words_.push_back(static_cast<int64_t>(number));
  }

  int64_t target_ = 0;
  c10::SmallVector<int64_t, 96> words_;  // attention backward, eight tensors, takes 75
};

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const {
    return key.hash();
  }
};

// Reads the fields back. Throws std::invalid_argument where the words are not those that a
// parameters struct writes.
class KeyReader {
 public:
  explicit KeyReader(const PlanKey& key) : words_(key.words()) {
    next();  // the name
  }

  template <class Params>
  static Params read(const PlanKey& key) {
    Params params;
    KeyReader reader(key);
    std::apply([&](auto&... field) { (reader.get(field), ...); }, Params::fields(params));
    if (reader.position_ != reader.words_.size()) fail();
    return params;
  }

 private:
  [[noreturn]] static void fail() {
    throw std::invalid_argument("cudnn_ops: these numbers are not the key of a plan");
  }
  int64_t next() {
    if (position_ == words_.size()) fail();
    return words_[position_++];
  }

  void get(TensorDesc& tensor) {
    tensor = TensorDesc();
    const int64_t head = next();
    tensor.dtype = static_cast<c10::ScalarType>(head >> 8);
    tensor.rank = static_cast<int>(head & 0xFF);
    if (head < 0 || head >> 8 >= static_cast<int64_t>(c10::ScalarType::NumOptions) ||
        tensor.rank > TensorDesc::kMaxRank) {
      fail();
    }
    for (int i = 0; i < tensor.rank; ++i) tensor.sizes[i] = next();
    for (int i = 0; i < tensor.rank; ++i) tensor.strides[i] = next();
  }
  void get(std::array<int64_t, 3>& list) {
    for (int64_t& number : list) number = next();
  }
  template <class T>
  void get(T& number) {
    number = static_cast<T>(next());
  }

  c10::ArrayRef<int64_t> words_;
  size_t position_ = 0;
};

// Calls visit(name, field) for each field.
template <class Params, class Visitor>
void visit_fields(const Params& params, Visitor&& visit) {
  const auto names = field_names<Params>();
  auto name = names.begin();
  std::apply([&](const auto&... field) { (visit(*name++, field), ...); }, Params::fields(params));
}

// Every field by name as whole numbers: "is_causal"; of a list "stride0" and so on; of a tensor
// "query.rank", "query.dtype" (a c10::ScalarType), "query.size0" and so on, and "query.extent", how
// many elements lie from its first to its last; 0 for what it has not.
using Facts = std::vector<std::pair<std::string, int64_t>>;

inline void add_facts(Facts& facts, const std::string& name, const TensorDesc& tensor) {
  int64_t extent = tensor.rank > 0 ? 1 : 0;
  for (int i = 0; i < TensorDesc::kMaxRank; ++i) {
    const int64_t size = i < tensor.rank ? tensor.sizes[i] : 0;
    facts.emplace_back(name + ".size" + std::to_string(i), size);
    if (size > 1) extent += (size - 1) * tensor.strides[i];
  }
  facts.emplace_back(name + ".extent", extent);
  facts.emplace_back(name + ".rank", tensor.rank);
  facts.emplace_back(name + ".dtype", static_cast<int64_t>(tensor.dtype));
}
inline void add_facts(Facts& facts, const std::string& name, const std::array<int64_t, 3>& list) {
  for (size_t i = 0; i < 3; ++i) facts.emplace_back(name + std::to_string(i), list[i]);
}
template <class T>
void add_facts(Facts& facts, const std::string& name, const T& number) {
  facts.emplace_back(name, static_cast<int64_t>(number));
}

template <class Params>
Facts facts(const Params& params) {
  Facts result;
  visit_fields(params,
               [&](const std::string& name, const auto& field) { add_facts(result, name, field); });
  return result;
}

// "sdpa(query=bf16[...]:[...], is_causal=1)"
template <class Params>
std::string describe(const Params& params) {
  std::ostringstream out;
  const char* separator = "(";
  out << Params::kName;
  visit_fields(params, [&](const std::string& name, const auto& field) {
    using Field = std::decay_t<decltype(field)>;
    out << separator << name << "=";
    if constexpr (std::is_same_v<Field, TensorDesc>) {
      out << field.str();
    } else if constexpr (std::is_same_v<Field, std::array<int64_t, 3>>) {
      out << c10::IntArrayRef(field);
    } else {
      out << static_cast<int64_t>(field);
    }
    separator = ", ";
  });
  out << ")";
  return out.str();
}

}  // namespace cudnn_ops::graph
