// Nim of two who move in turns: `raynforce.envs.tiny_agents:Nim` with masks; `heap` is its size, by the seed if it is not given.
#include "raynforce.hpp"

struct Nim {
  static constexpr bool turns = true;
  static constexpr std::size_t state = 1;
  static std::vector<raynforce::Agent> agents() {
    const raynforce::Leaf take = raynforce::discrete(3);
    const raynforce::Spaces player{{raynforce::discrete(11).named("observation"), raynforce::action_mask(take)}, take};
    return {{"first", player}, {"second", player}};
  }
  explicit Nim(const raynforce::Json& config) : heap(static_cast<int>(config["heap"].number(0))) {}

  void show(raynforce::Agents& agents, std::size_t agent) const {
    *agents.obs(agent).data<std::int64_t>(0) = left;
    for (int take = 1; take <= 3; ++take) agents.obs(agent).data<std::uint8_t>(1)[take - 1] = left >= take;
    agents.state()[0] = static_cast<float>(left);
  }
  void reset(std::uint64_t seed, raynforce::Agents& agents) {
    left = heap > 0 ? heap : 1 + static_cast<int>(seed % 10);
    show(agents, 0);
    agents.turn(0);
  }
  void step(raynforce::Agents& agents) {
    const std::size_t mover = agents.acts(0) ? 0 : 1, other = 1 - mover;
    left -= static_cast<int>(agents.action(mover).choice()) + 1;
    if (left < 0) throw std::runtime_error("a forbidden move");
    show(agents, other);
    if (left > 0) return agents.turn(other);
    show(agents, mover);
    agents.reward(mover, 1), agents.reward(other, -1);
    agents.end();
  }
  std::string save() const { return raynforce::pack(left); }
  void load(const std::string& saved) { raynforce::unpack(saved, left); }

  int heap, left = 0;
};

int main(int argc, char** argv) { return raynforce::serve<Nim>(argc, argv); }
