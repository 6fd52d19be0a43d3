// Makes a plan without running it, for the live GPU or a described one: to ask whether cuDNN
// supports it, to have it ready, or to write it to a file.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace cudnn_ops::graph {

// supported, reason (empty if supported), engine, workspace in bytes, Plan::origin()
using Answer = std::tuple<bool, std::string, std::string, int64_t, std::string>;

// `words` are a PlanKey's. `device` is the JSON description of a GPU, or "current" for the live
// one. The plan goes to the cache. Throws std::invalid_argument for words that are no key and for
// what describes no GPU, CudnnError where no libcudnn can be had.
Answer ask(c10::ArrayRef<int64_t> words, const std::string& device);

// Has it made in the background (background_plans.h), without an answer. Throws as ask().
void make_in_background(c10::ArrayRef<int64_t> words, const std::string& device);

// supported, reason (empty if supported and written), name of the record's file (empty if not
// written)
using Written = std::tuple<bool, std::string, std::string>;

// Makes a plan for a bundle, for a described GPU, and writes its record into `folder`. Neither asks
// the cache nor adds to it. Throws as ask(), and CudnnError where the file cannot be written.
Written write_plan(c10::ArrayRef<int64_t> words, const std::string& device,
                   const std::string& folder);

}  // namespace cudnn_ops::graph
