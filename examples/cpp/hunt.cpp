// Several agents: two hunters look for a prey on a ring of nine places. They have spaces of their own, and come and go.
// A hunter sees how far ahead the prey is, and takes one of three moves; the prey sees both hunters, and pulls to one side (below -0.3 or above 0.3).
// Who catches the prey gets 1, the prey -1; a step that it is free gives it 0.1. The second hunter comes after two steps; the first gives up after eight.
//
//     g++ -std=c++17 -O2 -pthread -I sdk/cpp examples/cpp/hunt.cpp -o hunt
//     raynforce train ppo ./hunt --config hunt.yaml      # policies: {hunter: {agents: ["hunter_*"]}, prey: {agents: [prey]}}
#include "raynforce.hpp"

struct Hunt {
  static constexpr int places = 9;
  static std::vector<raynforce::Agent> agents() {
    const raynforce::Spaces hunter{{raynforce::discrete(places)}, raynforce::discrete(3)};
    return {{"hunter_0", hunter}, {"hunter_1", hunter}, {"prey", {{raynforce::box({2})}, raynforce::box({1}, -1, 1)}}};
  }
  explicit Hunt(const raynforce::Json& config) : start(static_cast<int>(config["start"].number(-1))) {}

  int ahead(int hunter) const { return (at[2] - at[hunter] + places) % places; }
  void show(raynforce::Agents& agents) const {
    for (int i = 0; i < 2; ++i) {
      *agents.obs(static_cast<std::size_t>(i)).data<std::int64_t>() = ahead(i);
      agents.obs(2)[static_cast<std::size_t>(i)] = static_cast<float>(ahead(i)) / 8;
    }
  }
  void reset(std::uint64_t seed, raynforce::Agents& agents) {
    at[0] = 0, at[1] = 6, at[2] = start >= 0 ? start : 1 + static_cast<int>(seed % 5), steps = 0;
    agents.leave(1);  // it is not there yet
    show(agents);
  }
  void step(raynforce::Agents& agents) {
    for (std::size_t i = 0; i < 2; ++i)
      if (agents.acts(i)) at[i] += static_cast<int>(agents.action(i).choice()) - 1;
    const float pull = agents.action(2)[0];
    at[2] += pull > 0.3F ? 1 : pull < -0.3F ? -1 : 0;
    for (int& place : at) place = (place + places) % places;
    agents.reward(2, 0.1);
    ++steps;
    show(agents);
    for (std::size_t i = 0; i < 2; ++i)
      if (agents.acts(i) && at[i] == at[2]) {
        agents.reward(i, 1), agents.reward(2, -1.1);
        return agents.end();
      }
    if (steps == 2) agents.enter(1);
    if (steps == 8) agents.leave(0);
    if (steps == 12) agents.end(true);  // a limit of time
  }

  std::string save() const { return raynforce::pack(at, steps); }  // for exact resumes; what agents see is saved beside
  void load(const std::string& state) { raynforce::unpack(state, at, steps); }

  int start, at[3] = {}, steps = 0;
};

int main(int argc, char** argv) { return raynforce::serve<Hunt>(argc, argv); }
