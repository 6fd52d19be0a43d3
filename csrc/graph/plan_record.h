// How a plan is written to a file, in the store's folder or in a bundle: its bytes behind a header
// and an identity, which says everything that could make the plan wrong to use.
#pragma once

#include "graph/plan_key.h"

#include <cstdint>
#include <optional>
#include <string>

namespace cudnn_ops::graph {

// Longest record that is read.
constexpr int64_t kMaxRecordBytes = int64_t{64} << 20;

// Versions of cuDNN and the frontend, the hash of the graphs' sources, `gpu` and the key's words.
std::string identity_of(const PlanKey& key, const std::string& gpu);

// A hash of it: 32 hexadecimal digits.
std::string name_of(const std::string& identity);

std::string make_record(const std::string& identity, const std::string& plan);

// The plan in a record of this identity; nothing where it is truncated or corrupted, or another's.
std::optional<std::string> plan_in(const std::string& record, const std::string& identity);

// The hash of the sources that say what a key means and what is built from it.
std::string graphs_version();

}  // namespace cudnn_ops::graph
