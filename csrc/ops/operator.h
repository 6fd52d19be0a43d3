// Between the dispatcher's long lists of arguments and one struct of arguments a family.
//
// Such a struct lists its members once more, in the order of the operator's schema
// (graph/fields.h). The operator's function type, its kernels, calls of it and what its autograd
// Node saves (autograd_node.h) follow from that list.
#pragma once

#include "graph/fields.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cudnn_ops {

using OptionalTensor = std::optional<at::Tensor>;

// The type of a parameter in the operator's function, from that of the member.
template <class Member>
struct Parameter {
  using type = Member;
};
template <>
struct Parameter<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct Parameter<OptionalTensor> {
  using type = const OptionalTensor&;
};
template <class T, unsigned size>
struct Parameter<c10::SmallVector<T, size>> {
  using type = c10::ArrayRef<T>;
};

// A tuple of references to the members.
template <class Args>
using FieldsOf = decltype(Args::fields(std::declval<Args&>()));

template <class Args, class Fields = FieldsOf<Args>>
struct Unpacked;
template <class Args, class... Members>
struct Unpacked<Args, std::tuple<Members&...>> {
  template <class Result>
  using Function = Result(typename Parameter<Members>::type...);

  class Borrowed {
   public:
    // Delegates, so that an exception in here finds the destructor.
    explicit Borrowed(typename Parameter<Members>::type... values) : Borrowed(Empty()) {
      std::apply([&](Members&... members) { (borrow(members, values), ...); }, Args::fields(args_));
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() {
      std::apply([](Members&... members) { (release(members), ...); }, Args::fields(args_));
    }
    const Args& operator*() const {
      return args_;
    }

   private:
    using Tensor = c10::MaybeOwnedTraits<at::Tensor>;
    struct Empty {};

    explicit Borrowed(Empty /*empty*/) {
    }

    template <class Member, class Value>
    static void borrow(Member& member, Value& value) {
      if constexpr (std::is_same_v<Member, at::Tensor>) {
        member = Tensor::createBorrow(value);
      } else if constexpr (std::is_same_v<Member, OptionalTensor>) {
        if (value) member.emplace(Tensor::createBorrow(*value));
      } else if constexpr (std::is_same_v<Member, std::decay_t<Value>>) {
        member = std::move(value);
      } else {
        member.append(value.begin(), value.end());
      }
    }
    template <class Member>
    static void release(Member& member) {
      if constexpr (std::is_same_v<Member, at::Tensor>) {
        Tensor::destroyBorrow(member);
      } else if constexpr (std::is_same_v<Member, OptionalTensor>) {
        if (member) Tensor::destroyBorrow(*member);
      }
    }

    Args args_;
  };

  template <class Result, Result (*body)(const Args&)>
  static Result kernel(typename Parameter<Members>::type... values) {
    return body(*Borrowed(std::forward<typename Parameter<Members>::type>(values)...));
  }
  template <class Result, Result (*body)(c10::DispatchKeySet, const Args&)>
  static Result kernel(c10::DispatchKeySet keys, typename Parameter<Members>::type... values) {
    return body(keys, *Borrowed(std::forward<typename Parameter<Members>::type>(values)...));
  }
};

// The struct of a function's arguments, made of the values of its members. The caller keeps the
// tensors as long as this lives, so nobody counts its references to them, which would take an
// operator several tenths of a microsecond; what is copied from it counts as ever.
template <class Args>
using Borrowed = typename Unpacked<Args>::Borrowed;

template <class Body>
struct KernelOf;
template <class Result, class Args>
struct KernelOf<Result (*)(const Args&)> {
  template <Result (*body)(const Args&)>
  static constexpr auto function = &Unpacked<Args>::template kernel<Result, body>;
};
template <class Result, class Args>
struct KernelOf<Result (*)(c10::DispatchKeySet, const Args&)> {
  template <Result (*body)(c10::DispatchKeySet, const Args&)>
  static constexpr auto function = &Unpacked<Args>::template kernel<Result, body>;
};

// A kernel for the dispatcher from a function of the struct, which may ask for the dispatch keys.
template <auto body>
constexpr auto kernel = KernelOf<decltype(body)>::template function<body>;

template <class Result, class Args>
class Operator {
 public:
  explicit Operator(const char* name, const char* overload = "")
      : handle_(c10::Dispatcher::singleton()
                    .findSchemaOrThrow(name, overload)
                    .template typed<typename Unpacked<Args>::template Function<Result>>()) {
  }
  Result call(const Args& args) const {
    return call_with(args);
  }
  // With the first of the arguments as a struct, and the others.
  template <class First, class... Others>
  Result call_with(const First& first, const Others&... others) const {
    return std::apply([&](const auto&... values) { return handle_.call(values..., others...); },
                      graph::fields_of(first));
  }
  template <class First, class... Others>
  Result redispatch(c10::DispatchKeySet keys, const First& first, const Others&... others) const {
    return std::apply(
        [&](const auto&... values) { return handle_.redispatch(keys, values..., others...); },
        graph::fields_of(first));
  }

 private:
  c10::TypedOperatorHandle<typename Unpacked<Args>::template Function<Result>> handle_;
};

namespace detail {

template <size_t start, class Tuple, size_t... i>
auto slice(const Tuple& tuple, std::index_sequence<i...> /*indices*/) {
  return std::tuple<std::tuple_element_t<start + i, Tuple>...>(std::get<start + i>(tuple)...);
}

}  // namespace detail

// The first `count` of a struct's fields, and the others: for a backward, whose schema has more
// arguments among those of the forward.
template <size_t count, class Tuple>
auto first_fields(const Tuple& fields) {
  return detail::slice<0>(fields, std::make_index_sequence<count>());
}
template <size_t count, class Tuple>
auto other_fields(const Tuple& fields) {
  constexpr size_t others = std::tuple_size_v<Tuple> - count;
  return detail::slice<count>(fields, std::make_index_sequence<others>());
}

}  // namespace cudnn_ops
