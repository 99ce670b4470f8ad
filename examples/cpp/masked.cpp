// A walk along nine places, where some moves are forbidden: the entry `action_mask` of the observation says which are not.
// From each place only some of four moves (0 to 3 places on) are allowed; 1 for reaching place 8, which ends it, and -0.01 a step.
//
//     g++ -std=c++17 -O2 -pthread -I sdk/cpp examples/cpp/masked.cpp -o masked
//     raynforce train ppo ./masked
#include "raynforce.hpp"

#include <stdexcept>

struct Masked {
  static raynforce::Spaces spaces() {
    const raynforce::Leaf action = raynforce::discrete(4);
    return {{raynforce::box({1}).named("place"), raynforce::action_mask(action)}, action};
  }
  static bool allowed(int place, int move) { return move != 0 && place + move <= 8 && (place + move) % 3 != 1; }

  void show(raynforce::Obs obs) const {
    obs.data<float>(0)[0] = static_cast<float>(place) / 8;
    for (int move = 0; move < 4; ++move) obs.data<std::uint8_t>(1)[move] = allowed(place, move);
  }
  void reset(std::uint64_t seed, raynforce::Obs obs) {
    place = seed % 2 == 0 ? 0 : 3, steps = 0;
    show(obs);
  }
  raynforce::Step step(raynforce::Action action, raynforce::Obs obs) {
    const int move = static_cast<int>(action.choice());
    if (!allowed(place, move)) throw std::runtime_error("move " + std::to_string(move) + " is forbidden at place " + std::to_string(place));
    place += move, ++steps;
    show(obs);  // at place 8 nothing is allowed, and nothing is chosen: the episode is over
    return {place == 8 ? 1.0 : -0.01, place == 8, steps == 20};
  }
  int place = 0, steps = 0;
};

int main(int argc, char** argv) { return raynforce::serve<Masked>(argc, argv); }
