// Bundles: many plans in one file, made ahead of time for a described GPU (plans/bundle.py, which
// writes the file, and decides who may read it and where). Only what is asked for is read, record
// by record (plan_record.h); a record that cannot be used is left aside with one warning a bundle,
// and the plan is built. Those that come with the package (plans/packaged.py) are looked for when
// the first plan for a GPU has to be made.
//
// Any thread may call anything here at any time.
#pragma once

#include "graph/plan_key.h"
#include "graph/target.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace cudnn_ops::graph {

class PlanBundle {
 public:
  // Reads from `descriptor`, a file that it closes in the end. `label` is what Plan::origin() says
  // of its plans. `gpu` is what its records' identities say; `targets` are those that it serves, as
  // Target::id() has them. Record i has names[i] and is put together of pieces[i]: where one
  // begins, its bytes, where the next begins, and so on. Records share pieces: many plans have the
  // same kernel.
  PlanBundle(int descriptor, std::string path, std::string label, std::string gpu,
             std::vector<int64_t> targets, const std::vector<std::string>& names,
             std::vector<std::vector<int64_t>> pieces);
  PlanBundle(const PlanBundle&) = delete;
  PlanBundle& operator=(const PlanBundle&) = delete;
  ~PlanBundle();

  const std::string& path() const {
    return path_;
  }
  const std::string& label() const {
    return label_;
  }
  bool contains(const PlanKey& key) const;
  // Plan::serialize()'s bytes.
  std::optional<std::string> load(const PlanKey& key) const;
  void warn_once(const std::string& reason) const;

 private:
  using Pieces = std::vector<int64_t>;
  // The pieces of this key's record; null where there is none for its target.
  const Pieces* find(const PlanKey& key, const std::string& identity) const;

  const int descriptor_;
  const std::string path_, label_, gpu_;
  const std::vector<int64_t> targets_;
  std::unordered_map<std::string, Pieces> records_;
  mutable std::atomic<bool> warned_{false};
};

// Those of this process.
class PlanBundles {
 public:
  // Never destroyed, as PlanCache.
  static PlanBundles& global();

  // In place of one of the same path, unless it is the package's.
  void add(std::shared_ptr<const PlanBundle> bundle);
  void remove(const std::string& path);
  bool any();
  // The first that has the plan, or null.
  std::shared_ptr<const PlanBundle> with(const PlanKey& key);

  // What adds the package's bundle for a GPU, if there is one: that of this description, or, where
  // it is empty, the current one. Null for a program without Python.
  using Finder = void (*)(const std::string& description);
  void set_finder(Finder finder);
  // Calls the finder, once for each target; others that ask for the same one wait.
  void find_for(const Target& target);

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<const PlanBundle>> bundles_;
  std::mutex finding_;
  std::unordered_set<int64_t> found_for_;
  std::atomic<Finder> finder_{nullptr};
};

}  // namespace cudnn_ops::graph
