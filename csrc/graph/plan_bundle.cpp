#include "graph/plan_bundle.h"

#include "graph/plan_record.h"
#include "graph/warn.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

namespace cudnn_ops::graph {
namespace {

bool read_at(int descriptor, int64_t offset, std::string& bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t more = ::pread(descriptor, bytes.data() + done, bytes.size() - done,
                                 offset + static_cast<int64_t>(done));
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) return false;
    done += static_cast<size_t>(more);
  }
  return true;
}

}  // namespace

PlanBundle::PlanBundle(int descriptor, std::string path, std::string gpu,
                       std::vector<int64_t> targets, const std::vector<std::string>& names,
                       const std::vector<int64_t>& offsets)
    : descriptor_(descriptor),
      path_(std::move(path)),
      gpu_(std::move(gpu)),
      targets_(std::move(targets)) {
  if (offsets.size() != names.size() + 1) {
    throw std::invalid_argument("cudnn_ops: a bundle needs an offset more than names");
  }
  for (size_t i = 0; i < names.size(); ++i) {
    places_.emplace(names[i], Place{offsets[i], offsets[i + 1]});
  }
}

PlanBundle::~PlanBundle() {
  ::close(descriptor_);
}

const PlanBundle::Place* PlanBundle::find(const PlanKey& key, const std::string& identity) const {
  if (std::find(targets_.begin(), targets_.end(), key.target()) == targets_.end()) return nullptr;
  const auto found = places_.find(name_of(identity));
  return found == places_.end() ? nullptr : &found->second;
}

bool PlanBundle::contains(const PlanKey& key) const {
  return find(key, identity_of(key, gpu_)) != nullptr;
}

std::optional<std::string> PlanBundle::load(const PlanKey& key) const {
  const std::string identity = identity_of(key, gpu_);
  const Place* place = find(key, identity);
  if (place == nullptr) return std::nullopt;
  const int64_t size = place->end - place->begin;
  std::optional<std::string> plan;
  if (size > 0 && size <= kMaxRecordBytes) {
    std::string record(static_cast<size_t>(size), '\0');
    if (read_at(descriptor_, place->begin, record)) plan = plan_in(record, identity);
  }
  if (!plan) warn_once("it is truncated or corrupted");
  return plan;
}

void PlanBundle::warn_once(const std::string& reason) const {
  if (warned_.exchange(true)) return;
  warn("cudnn_ops: a plan of the bundle " + path_ + " is built anew: " + reason);
}

PlanBundles& PlanBundles::global() {
  static PlanBundles* bundles = new PlanBundles();
  return *bundles;
}

void PlanBundles::add(std::shared_ptr<const PlanBundle> bundle) {
  remove(bundle->path());
  std::lock_guard<std::mutex> lock(mutex_);
  bundles_.push_back(std::move(bundle));
}

void PlanBundles::remove(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  bundles_.erase(std::remove_if(bundles_.begin(), bundles_.end(),
                                [&](const auto& bundle) { return bundle->path() == path; }),
                 bundles_.end());
}

bool PlanBundles::any() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !bundles_.empty();
}

std::shared_ptr<const PlanBundle> PlanBundles::with(const PlanKey& key) {
  std::vector<std::shared_ptr<const PlanBundle>> bundles;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bundles = bundles_;
  }
  for (const auto& bundle : bundles) {
    if (bundle->contains(key)) return bundle;
  }
  return nullptr;
}

}  // namespace cudnn_ops::graph
