// An engine that owns its loop: each tick it looks for requests, and advances all of its worlds a little.
#include <chrono>
#include <thread>

#include "raynforce.hpp"

struct World {
  int asked = 0, left = 0;  // ticks until a step is through
  bool resetting = false, saving = false;
  float value = 0;
  int steps = 0;
};

int main(int argc, char** argv) try {
  raynforce::Options options = raynforce::Options::parse(argc, argv);
  options.who.saves = true;
  raynforce::Server server({{raynforce::box({1})}, raynforce::discrete(3)}, options);
  std::vector<World> worlds(server.envs());
  while (server.running()) {
    for (const raynforce::Request& request : server.poll(0)) {
      World& world = worlds[request.env];
      world.asked = 1, world.left = 1 + static_cast<int>(request.env);  // some take longer than others
      world.saving = request.kind == raynforce::Request::Kind::save;
      world.resetting = request.kind == raynforce::Request::Kind::reset;
      if (request.kind == raynforce::Request::Kind::load) {
        raynforce::unpack(request.state, world.value, world.steps);
        world.resetting = true;
      } else if (world.saving) {
        continue;
      } else if (world.resetting) world.value = static_cast<float>(request.seed % 1000), world.steps = 0;
      else world.value += static_cast<float>(request.action.choice()), ++world.steps;
    }
    for (std::size_t i = 0; i < worlds.size(); ++i) {
      World& world = worlds[i];
      if (world.asked == 0 || --world.left > 0) continue;
      world.asked = 0;
      if (world.saving) {
        server.submit_state(i, raynforce::pack(world.value, world.steps));
        continue;
      }
      server.obs(i)[0] = world.value;
      server.submit(i, {world.resetting ? 0.0 : 1.0, false, !world.resetting && world.steps == 4});
    }
    server.flush();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return server.ended().code == "closed" ? 0 : 1;
} catch (const raynforce::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
