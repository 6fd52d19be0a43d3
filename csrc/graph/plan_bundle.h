// Bundles: many plans in one file, made ahead of time for a described GPU (plans/bundle.py, which
// writes the file, and decides who may read it and where). Only what is asked for is read, record
// by record (plan_record.h); a record that cannot be used is left aside with one warning a bundle,
// and the plan is built.
//
// Any thread may call anything here at any time.
#pragma once

#include "graph/plan_key.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace cudnn_ops::graph {

class PlanBundle {
 public:
  // Reads from `descriptor`, a file that it closes in the end. `gpu` is what its records'
  // identities say; `targets` are those that it serves, as Target::id() has them. Record i has
  // names[i], begins at offsets[i] and ends at offsets[i + 1].
  PlanBundle(int descriptor, std::string path, std::string gpu, std::vector<int64_t> targets,
             const std::vector<std::string>& names, const std::vector<int64_t>& offsets);
  PlanBundle(const PlanBundle&) = delete;
  PlanBundle& operator=(const PlanBundle&) = delete;
  ~PlanBundle();

  const std::string& path() const {
    return path_;
  }
  bool contains(const PlanKey& key) const;
  // Plan::serialize()'s bytes.
  std::optional<std::string> load(const PlanKey& key) const;
  void warn_once(const std::string& reason) const;

 private:
  struct Place {
    int64_t begin, end;
  };
  // Where the record of this key is; null where there is none for its target.
  const Place* find(const PlanKey& key, const std::string& identity) const;

  const int descriptor_;
  const std::string path_, gpu_;
  const std::vector<int64_t> targets_;
  std::unordered_map<std::string, Place> places_;
  mutable std::atomic<bool> warned_{false};
};

// Those of this process.
class PlanBundles {
 public:
  // Never destroyed, as PlanCache.
  static PlanBundles& global();

  // In place of one of the same path.
  void add(std::shared_ptr<const PlanBundle> bundle);
  void remove(const std::string& path);
  bool any();
  // The first that has the plan, or null.
  std::shared_ptr<const PlanBundle> with(const PlanKey& key);

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<const PlanBundle>> bundles_;
};

}  // namespace cudnn_ops::graph
