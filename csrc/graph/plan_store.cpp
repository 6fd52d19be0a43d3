#include "graph/plan_store.h"

#include "graph/plan_record.h"
#include "graph/warn.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

namespace cudnn_ops::graph {
namespace {

constexpr const char* kSuffix = ".plan";
constexpr const char* kTemporary = ".writing-";
constexpr time_t kAbandonedAfterSeconds = 3600;  // a file half written by a process that died

std::string path_of(const std::string& folder, const std::string& identity) {
  return folder + "/" + name_of(identity) + kSuffix;
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const {
    return descriptor_;
  }
  bool write_all(const char* data, size_t size) const {
    while (size > 0) {
      const ssize_t done = ::write(descriptor_, data, size);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return false;
      data += done;
      size -= static_cast<size_t>(done);
    }
    return true;
  }
  bool read_all(char* data, size_t size) const {
    while (size > 0) {
      const ssize_t done = ::read(descriptor_, data, size);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return false;
      data += done;
      size -= static_cast<size_t>(done);
    }
    return true;
  }
  // Some file systems tell of a full disk only here.
  bool close() {
    const int descriptor = descriptor_;
    descriptor_ = -1;
    return ::close(descriptor) == 0;
  }

 private:
  int descriptor_;
};

std::string error_text() {
  return std::strerror(errno);
}

// Why nobody should read or write plans there; empty if all is well.
std::string distrust(const struct stat& status) {
  if (status.st_uid != geteuid()) return "it belongs to another user";
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "other users can write to it";
  return {};
}

std::string folder_refusal(const std::string& folder) {
  struct stat status{};
  if (stat(folder.c_str(), &status) != 0) return errno == ENOENT ? std::string() : error_text();
  if (!S_ISDIR(status.st_mode)) return "it is not a folder";
  return distrust(status);
}

// Makes the folder, and those above it that are missing; only this user may enter it.
bool make_folder(const std::string& folder) {
  for (size_t end = folder.find('/', 1); end != std::string::npos;
       end = folder.find('/', end + 1)) {
    mkdir(folder.substr(0, end).c_str(), 0755);
  }
  return mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST;
}

struct Entry {
  std::string path;
  int64_t bytes;
  struct timespec used;
  bool is_plan;  // else a file being written
};

std::vector<Entry> entries_of(const std::string& folder) {
  std::vector<Entry> entries;
  DIR* listing = opendir(folder.c_str());
  if (listing == nullptr) return entries;
  while (const dirent* item = readdir(listing)) {
    const std::string name = item->d_name;
    const bool is_plan =
        name.size() > std::strlen(kSuffix) &&
        name.compare(name.size() - std::strlen(kSuffix), std::string::npos, kSuffix) == 0;
    if (!is_plan && name.rfind(kTemporary, 0) != 0) continue;
    struct stat status{};
    const std::string path = folder + "/" + name;
    if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    entries.push_back({path, static_cast<int64_t>(status.st_size), status.st_mtim, is_plan});
  }
  closedir(listing);
  return entries;
}

void trim(const std::string& folder, int64_t limit) {
  std::vector<Entry> entries = entries_of(folder);
  int64_t total = 0;
  const time_t now = time(nullptr);
  for (const auto& entry : entries) {
    if (entry.is_plan) {
      total += entry.bytes;
    } else if (now - entry.used.tv_sec > kAbandonedAfterSeconds) {
      unlink(entry.path.c_str());
    }
  }
  if (total <= limit) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.used.tv_sec != b.used.tv_sec ? a.used.tv_sec < b.used.tv_sec
                                          : a.used.tv_nsec < b.used.tv_nsec;
  });
  for (const auto& entry : entries) {
    if (total <= limit) return;
    if (entry.is_plan && unlink(entry.path.c_str()) == 0) total -= entry.bytes;
  }
}

// The plan in an open file, or why it cannot be used.
std::optional<std::string> read_plan(const File& file, const std::string& identity,
                                     std::string& reason) {
  struct stat status{};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    reason = "it is no file";
    return std::nullopt;
  }
  reason = distrust(status);
  if (!reason.empty()) return std::nullopt;
  const auto size = static_cast<int64_t>(status.st_size);
  std::optional<std::string> plan;
  if (size <= kMaxRecordBytes) {
    std::string record(static_cast<size_t>(size), '\0');
    if (file.read_all(record.data(), record.size())) plan = plan_in(record, identity);
  }
  if (!plan) reason = "it is truncated or corrupted, or another version wrote it";
  return plan;
}

}  // namespace

PlanStore& PlanStore::global() {
  static PlanStore* store = new PlanStore();
  return *store;
}

void PlanStore::set_folder(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  std::lock_guard<std::mutex> lock(mutex_);
  folder_ = std::move(folder);
  warned_ = {};
}

bool PlanStore::is_on() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !folder_.empty();
}

void PlanStore::set_limit(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = bytes;
}

std::string PlanStore::folder_and_limit(int64_t& limit) {
  std::string folder;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    folder = folder_;
    limit = limit_;
  }
  if (folder.empty()) return folder;
  const std::string refusal = folder_refusal(folder);
  if (refusal.empty()) return folder;
  warn_once(kFolder, "the plan store " + folder + " is not used: " + refusal +
                         "; name another folder in CUDNN_OPS_CACHE_DIR");
  return {};
}

void PlanStore::warn_once(Trouble trouble, const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(warned_[trouble], true)) return;
  }
  warn("cudnn_ops: " + message);
}

bool PlanStore::contains(const PlanKey& key, const std::string& gpu) {
  int64_t limit = 0;
  const std::string folder = folder_and_limit(limit);
  if (folder.empty()) return false;
  return access(path_of(folder, identity_of(key, gpu)).c_str(), R_OK) == 0;
}

std::optional<std::string> PlanStore::load(const PlanKey& key, const std::string& gpu) {
  int64_t limit = 0;
  const std::string folder = folder_and_limit(limit);
  if (folder.empty()) return std::nullopt;
  const std::string identity = identity_of(key, gpu);
  const std::string path = path_of(folder, identity);
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() < 0) return std::nullopt;
  std::string reason;
  auto plan = read_plan(file, identity, reason);
  if (plan) {
    futimens(file.get(), nullptr);  // used just now; a read-only folder keeps no such account
  } else {
    warn_once(kFile, "the stored plan " + path + " is built anew: " + reason);
  }
  return plan;
}

void PlanStore::save(const PlanKey& key, const std::string& gpu, const std::string& plan) {
  int64_t limit = 0;
  const std::string folder = folder_and_limit(limit);
  if (folder.empty() || plan.empty()) return;
  const std::string identity = identity_of(key, gpu);
  const std::string record = make_record(identity, plan);
  const std::string path = path_of(folder, identity);
  // Nobody else's, whichever machine or container shares the folder.
  std::string temporary = folder + "/" + kTemporary + "XXXXXX";
  bool written = make_folder(folder);
  if (written) {
    File file(mkostemp(temporary.data(), O_CLOEXEC));
    written = file.get() >= 0;
    if (written && !(file.write_all(record.data(), record.size()) && file.close() &&
                     std::rename(temporary.c_str(), path.c_str()) == 0)) {
      written = false;
      const int trouble = errno;
      unlink(temporary.c_str());
      errno = trouble;
    }
  }
  if (!written) {
    warn_once(kWrite, "plans cannot be stored in " + folder + ": " + error_text() +
                          "; the next process will build them again");
    return;
  }
  trim(folder, limit);
}

StoreInfo PlanStore::info() {
  StoreInfo info{};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    info.folder = folder_;
    info.limit = limit_;
  }
  if (info.folder.empty()) return info;
  info.refusal = folder_refusal(info.folder);
  for (const auto& entry : entries_of(info.folder)) {
    info.files += entry.is_plan;
    info.bytes += entry.bytes;
  }
  return info;
}

int64_t PlanStore::clear() {
  std::string folder;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    folder = folder_;
  }
  int64_t deleted = 0;
  if (folder.empty() || !folder_refusal(folder).empty()) return deleted;
  for (const auto& entry : entries_of(folder)) {
    if (unlink(entry.path.c_str()) == 0) deleted += entry.is_plan;
  }
  return deleted;
}

}  // namespace cudnn_ops::graph
