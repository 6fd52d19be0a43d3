// A struct that lists its members once, for everything that is done to all of them:
//
//   struct Rotary {
//     at::Tensor input, cos, sin;
//     bool is_backward = false;
//     CUDNN_OPS_FIELDS(input, cos, sin, is_backward)
//   };
//
// Rotary::fields(rotary) is a tuple of references to them, field_names<Rotary>() are their names. A
// member that has fields of its own stands for these. A plan's key is made from such a list
// (plan_key.h), and so is what the dispatcher and autograd need to know of an operator
// (ops/operator.h).
#pragma once

#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cudnn_ops::graph {

template <class T, class = void>
struct HasFields : std::false_type {};
template <class T>
struct HasFields<T, std::void_t<decltype(T::fields(std::declval<T&>()))>> : std::true_type {};

template <class T>
auto fields_of(T& member) {
  if constexpr (HasFields<std::remove_const_t<T>>::value) {
    return T::fields(member);
  } else {
    return std::tie(member);
  }
}

template <class... Members>
auto fields_of_all(const std::tuple<Members&...>& members) {
  return std::apply([](auto&... member) { return std::tuple_cat(fields_of(member)...); }, members);
}

// Of a struct that CUDNN_OPS_FIELDS lists, and so those that its members have.
template <class T>
std::vector<std::string> field_names() {
  std::vector<std::string> names;
  std::istringstream list(T::kMembers);
  const T value{};
  const auto add = [&](const auto& member) {
    using Member = std::decay_t<decltype(member)>;
    std::string name;
    std::getline(list >> std::ws, name, ',');
    if constexpr (HasFields<Member>::value) {
      for (auto& inner : field_names<Member>()) names.push_back(std::move(inner));
    } else {
      names.push_back(std::move(name));
    }
  };
  std::apply([&](const auto&... member) { (add(member), ...); }, value.members());
  return names;
}

}  // namespace cudnn_ops::graph

#define CUDNN_OPS_FIELDS(...)                               \
  static constexpr const char* kMembers = #__VA_ARGS__;     \
  auto members() {                                          \
    return std::tie(__VA_ARGS__);                           \
  }                                                         \
  auto members() const {                                    \
    return std::tie(__VA_ARGS__);                           \
  }                                                         \
  template <class Self>                                     \
  static auto fields(Self& self) {                          \
    return cudnn_ops::graph::fields_of_all(self.members()); \
  }
