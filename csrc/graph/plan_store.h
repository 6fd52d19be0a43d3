// The cache on disk: one file a plan, in a folder that many processes may share.
//
// A stored plan is code that will run on the GPU, so the folder must belong to this user and be
// writable by nobody else; one that is not is left alone. A file is written beside its place and
// moved into it, so a reader sees all of it or none; whatever a reader cannot use (truncated,
// corrupted, another version's, somebody else's) it leaves aside, and the plan is built.
// Nothing that goes wrong here fails a call: there is one warning for each kind of trouble.
//
// Any thread may call anything here at any time.
#pragma once

#include "graph/plan_key.h"

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace cudnn_ops::graph {

struct StoreInfo {
  std::string folder;   // empty when the store is off
  std::string refusal;  // why the folder is not used, empty if it is
  int64_t files;
  int64_t bytes;
  int64_t limit;
};

class PlanStore {
 public:
  // Never destroyed, as PlanCache.
  static PlanStore& global();

  // Empty turns the store off. The folder is made when the first plan is saved.
  void set_folder(std::string folder);
  bool is_on();
  // Most bytes of plans that the folder keeps; the least recently used go first.
  void set_limit(int64_t bytes);

  // `gpu` is Target::gpu(). contains() only looks whether there is a file; what load() gives is
  // what save() got for the same key, GPU, versions of cuDNN and the frontend, and sources of the
  // graphs.
  bool contains(const PlanKey& key, const std::string& gpu);
  std::optional<std::string> load(const PlanKey& key, const std::string& gpu);
  void save(const PlanKey& key, const std::string& gpu, const std::string& plan);

  StoreInfo info();
  // Deletes every plan; returns how many.
  int64_t clear();

 private:
  enum Trouble { kFolder, kFile, kWrite, kTroubles };

  std::string folder_and_limit(int64_t& limit);
  void warn_once(Trouble trouble, const std::string& message);

  std::mutex mutex_;
  std::string folder_;
  int64_t limit_ = int64_t{256} << 20;
  std::array<bool, kTroubles> warned_{};
};

}  // namespace cudnn_ops::graph
