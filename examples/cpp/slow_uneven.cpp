// Slow and uneven: a step takes 10 to 50 ms, as if it were computed elsewhere. All environments of the process are under way at once, on
// one thread that sleeps until the next of them is done: raynforce train ppo ./slow_uneven --envs 64 --topology central
// To be done: tell which of three numbers is the largest, 1 for each right answer; an episode has 20 steps on average.
#include <algorithm>
#include <chrono>
#include <queue>
#include <random>

#include "raynforce.hpp"

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

struct World {
  std::mt19937_64 random;
  float numbers[3];
  Clock::time_point began;
  raynforce::Step result;  // of the step that is under way

  void show(raynforce::Obs obs) {
    for (float& number : numbers) number = std::uniform_real_distribution<float>(0, 1)(random);
    std::copy(numbers, numbers + 3, obs.data());
  }
};

int main(int argc, char** argv) try {
  raynforce::Server server({{raynforce::box({3})}, raynforce::discrete(3)}, raynforce::Options::parse(argc, argv));
  std::vector<World> worlds(server.envs());
  using Due = std::pair<Clock::time_point, std::uint32_t>;  // when an environment is done with its step
  std::priority_queue<Due, std::vector<Due>, std::greater<>> under_way;
  double low = 10, high = 50;
  const auto milliseconds_left = [&] {  // to the nearest one, so that steps take no longer than they should on average
    return under_way.empty() ? -1 : std::max(0, static_cast<int>(std::chrono::round<std::chrono::milliseconds>(under_way.top().first - Clock::now()).count()));
  };

  while (server.running()) {
    for (const raynforce::Request& request : server.poll(milliseconds_left())) {
      World& world = worlds[request.env];
      if (request.kind == raynforce::Request::Kind::reset) {
        const raynforce::Json config = server.config(request.env);
        low = config["low"].number(10), high = config["high"].number(50);
        world.random.seed(request.seed);
        world.show(server.obs(request.env));
        server.submit(request.env);
      } else {
        const auto largest = std::max_element(world.numbers, world.numbers + 3) - world.numbers;
        world.result = {request.action.choice() == largest ? 1.0 : 0.0, std::bernoulli_distribution(0.05)(world.random), false};
        world.began = Clock::now();
        const Milliseconds takes(std::uniform_real_distribution<double>(low, high)(world.random));
        under_way.emplace(world.began + std::chrono::duration_cast<Clock::duration>(takes), request.env);
      }
    }
    while (milliseconds_left() == 0) {
      const std::uint32_t env = under_way.top().second;
      under_way.pop();
      worlds[env].show(server.obs(env));
      server.submit(env, worlds[env].result, std::chrono::duration<float>(Clock::now() - worlds[env].began).count());
    }
  }
  const raynforce::Ended ended = server.ended();
  if (ended.code != "closed") std::fprintf(stderr, "%s\n", ended.text.c_str());
  return ended.code == "closed" ? 0 : 1;
} catch (const raynforce::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
