/* The process that holds namespaces open and buries orphans: PID 1 of every pod's sandbox, and of the cluster's own node.
 * Static, so that its image is this one file. Built with: cc -O2 -static -o pause pause.c */
#include <signal.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int sig) {
  (void)sig;
  _exit(0);
}

static void bury(int sig) {
  (void)sig;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

int main(void) {
  /* PID 1 ignores every signal without a handler, so the two that ask it to leave get one. */
  struct sigaction on_term = {.sa_handler = leave}, on_child = {.sa_handler = bury, .sa_flags = SA_NOCLDSTOP};
  if (sigaction(SIGTERM, &on_term, NULL) || sigaction(SIGINT, &on_term, NULL) || sigaction(SIGCHLD, &on_child, NULL)) {
    return 1;
  }
  for (;;) {
    pause();
  }
}
