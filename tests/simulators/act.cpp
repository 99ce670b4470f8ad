// Prints a policy's outputs, its action, one that it draws and that one's log-probability, for observations that are read from a file: the
// leaves' bytes, one observation after another.
#include "raynforce.hpp"

#include <random>

int main(int argc, char** argv) try {
  if (argc != 3) throw raynforce::Error("usage: act POLICY OBSERVATIONS");
  raynforce::Policy policy = raynforce::Policy::load(argv[1]);
  const std::string data = raynforce::detail::read_file(argv[2]);
  std::mt19937_64 random(1);
  for (std::size_t at = 0; at < data.size();) {
    std::vector<const void*> obs;
    for (const raynforce::Leaf& leaf : policy.spaces().obs) obs.push_back(data.data() + at), at += leaf.bytes();
    for (const float value : policy.outputs(obs)) std::printf("%.9g ", static_cast<double>(value));
    std::vector<std::uint8_t> action(policy.spaces().action.bytes());
    policy.act(obs, action.data());
    for (std::size_t i = 0; i < policy.spaces().action.elements(); ++i)
      std::printf("%.9g ", raynforce::detail::element(policy.spaces().action.dtype, action.data(), i));
    std::vector<std::uint8_t> drawn(action.size());
    const float logp = policy.sample(obs, action.data(), drawn.data(), random);
    for (std::size_t i = 0; i < policy.spaces().action.elements(); ++i)
      std::printf("%.9g ", raynforce::detail::element(policy.spaces().action.dtype, drawn.data(), i));
    std::printf("%.9g\n", static_cast<double>(logp));
  }
} catch (const raynforce::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
