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

bool read_at(int descriptor, int64_t offset, char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t more = ::pread(descriptor, bytes, size, offset);
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) return false;
    bytes += more;
    offset += more;
    size -= static_cast<size_t>(more);
  }
  return true;
}

// Puts a record together.
bool read_pieces(int descriptor, const std::vector<int64_t>& pieces, std::string& record) {
  for (size_t i = 0; i < pieces.size(); i += 2) {
    const int64_t size = pieces[i + 1];
    const size_t begin = record.size();
    if (size < 0 || size > kMaxRecordBytes - static_cast<int64_t>(begin)) return false;
    record.resize(begin + static_cast<size_t>(size));
    if (!read_at(descriptor, pieces[i], record.data() + begin, static_cast<size_t>(size))) {
      return false;
    }
  }
  return true;
}

}  // namespace

PlanBundle::PlanBundle(int descriptor, std::string path, std::string label, std::string gpu,
                       std::vector<int64_t> targets, const std::vector<std::string>& names,
                       std::vector<std::vector<int64_t>> pieces)
    : descriptor_(descriptor),
      path_(std::move(path)),
      label_(std::move(label)),
      gpu_(std::move(gpu)),
      targets_(std::move(targets)) {
  if (pieces.size() != names.size()) {
    throw std::invalid_argument("cudnn_ops: a bundle needs the pieces of each of its plans");
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (pieces[i].size() % 2 != 0) {
      throw std::invalid_argument("cudnn_ops: a piece of a bundle has an offset and a size");
    }
    records_.emplace(names[i], std::move(pieces[i]));
  }
}

PlanBundle::~PlanBundle() {
  ::close(descriptor_);
}

const PlanBundle::Pieces* PlanBundle::find(const PlanKey& key, const std::string& identity) const {
  if (std::find(targets_.begin(), targets_.end(), key.target()) == targets_.end()) return nullptr;
  const auto found = records_.find(name_of(identity));
  return found == records_.end() ? nullptr : &found->second;
}

bool PlanBundle::contains(const PlanKey& key) const {
  return find(key, identity_of(key, gpu_)) != nullptr;
}

std::optional<std::string> PlanBundle::load(const PlanKey& key) const {
  const std::string identity = identity_of(key, gpu_);
  const Pieces* pieces = find(key, identity);
  if (pieces == nullptr) return std::nullopt;
  std::string record;
  const bool is_read = read_pieces(descriptor_, *pieces, record);
  auto plan = is_read ? plan_in(record, identity) : std::nullopt;
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
  // The package's is asked for once by each target, and the others go on using theirs.
  if (bundle->label() == bundle->path()) remove(bundle->path());
  std::lock_guard<std::mutex> lock(mutex_);
  bundles_.push_back(std::move(bundle));
}

void PlanBundles::remove(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  bundles_.erase(std::remove_if(bundles_.begin(), bundles_.end(),
                                [&](const auto& bundle) { return bundle->path() == path; }),
                 bundles_.end());
}

void PlanBundles::set_finder(Finder finder) {
  finder_ = finder;
}

void PlanBundles::find_for(const Target& target) {
  const Finder finder = finder_;
  if (finder == nullptr) return;
  std::lock_guard<std::mutex> lock(finding_);
  if (found_for_.insert(target.id()).second) finder(target.description());
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
