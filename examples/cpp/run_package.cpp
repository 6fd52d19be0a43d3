// Runs what torch.export and AOTInductor made of a model, without Python:
//
//   run_package model.pt2 inputs.pt outputs.pt
//
// inputs.pt is a list of tensors that torch.save wrote; torch.load reads outputs.pt, a tuple.

#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace {

std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& item : list.toListRef()) tensors.push_back(item.toTensor());
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  std::vector<c10::IValue> items(tensors.begin(), tensors.end());
  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(items)));
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_package model.pt2 inputs.pt outputs.pt\n";
    return 2;
  }
  try {
    const c10::InferenceMode no_gradients;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const std::vector<at::Tensor> outputs = model.run(read_tensors(argv[2]));
    for (const auto& output : outputs) {
      std::cout << output.toString() << ' ' << output.sizes() << '\n';
    }
    write_tensors(argv[3], outputs);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
