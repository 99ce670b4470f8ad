// A simulator as tutorials connect one: REQ/REP and JSON, one environment a message. Its environments do next to nothing.
#include <zmq.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: ping_pong ADDRESS ENVS\n"), 2;
  void* context = zmq_ctx_new();
  void* socket = zmq_socket(context, ZMQ_REP);
  if (zmq_connect(socket, argv[1]) != 0) return std::fprintf(stderr, "%s: %s\n", argv[1], zmq_strerror(zmq_errno())), 2;
  std::vector<double> places(static_cast<std::size_t>(std::atoi(argv[2])));
  while (true) {
    char asked[256], answer[256];
    const int bytes = zmq_recv(socket, asked, sizeof asked - 1, 0);
    if (bytes < 0) return 1;
    asked[bytes < 255 ? bytes : 255] = '\0';
    unsigned env = 0;
    int action = 0;
    const bool stepping = std::sscanf(asked, R"({"env": %u, "action": %d})", &env, &action) == 2 && env < places.size();
    if (!stepping) return 0;
    double& place = places[env];
    place += action == 1 ? 0.01 : -0.01;
    const bool done = place > 1 || place < -1;
    const int length = std::snprintf(answer, sizeof answer, R"({"obs": [%.9g, %.9g, %.9g, %.9g], "reward": 1.0, "done": %s})", place, place, place, place, done ? "true" : "false");
    if (done) place = 0;
    zmq_send(socket, answer, static_cast<std::size_t>(length), 0);
  }
}
