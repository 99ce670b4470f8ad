// Several choices at once, of which the observation tells: what the env was given can be compared with what was recorded.
#include "raynforce.hpp"

struct Choices {
  static raynforce::Spaces spaces() {
    raynforce::Leaf action = raynforce::multidiscrete({2, 3});
    action.start = {5, -1};
    return {{raynforce::box<double>({2})}, action};
  }
  void reset(std::uint64_t seed, raynforce::Obs obs) {
    steps = 0;
    obs.data<double>()[0] = static_cast<double>(seed % 7), obs.data<double>()[1] = 0;
  }
  raynforce::Step step(raynforce::Action action, raynforce::Obs obs) {
    for (std::size_t i = 0; i < 2; ++i) obs.data<double>()[i] = static_cast<double>(action.choice(i));
    return {0.5, false, ++steps == 9};
  }
  int steps = 0;
};

int main(int argc, char** argv) { return raynforce::serve<Choices>(argc, argv); }
