// The stream of changes. It reconnects with increasing pauses and reports its state.

const firstPause = 500;
const longestPause = 30000;
// The server sends a heartbeat every 15 seconds. Without one for much longer, the connection is dead.
const silence = 45000;
const hiddenPatience = 10000;

export class Stream {
  /** on has whole(message), delta(seq, message) and state(name, detail). A delta that throws causes a new connection. */
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.pause = firstPause;
    document.addEventListener("visibilitychange", () => this.visibility());
    // A page in the back/forward cache needs no connection.
    addEventListener("pagehide", () => this.close());
    addEventListener("pageshow", (event) => event.persisted && this.open());
    this.open();
  }

  open() {
    this.close();
    if (!this.lost) this.on.state("connecting", {});
    const source = new EventSource(this.url);
    this.source = source;
    source.addEventListener("whole", (event) => {
      this.heard();
      this.pause = firstPause;
      this.lost = undefined;
      this.on.whole(JSON.parse(event.data));
      this.on.state("live", {});
    });
    source.addEventListener("delta", (event) => {
      this.heard();
      try {
        this.on.delta(Number(event.lastEventId), JSON.parse(event.data));
      } catch {
        this.open();
      }
    });
    source.addEventListener("beat", () => this.heard());
    source.addEventListener("error", () => this.failed());
    this.heard();
  }

  close() {
    this.source?.close();
    this.source = undefined;
    clearTimeout(this.silent);
    clearTimeout(this.retry);
  }

  heard() {
    clearTimeout(this.silent);
    this.silent = setTimeout(() => this.failed(), silence);
  }

  failed() {
    this.close();
    this.lost ??= Date.now();
    // Half of the pause is random, so that many pages don't reconnect at the same time.
    const wait = this.pause * (0.5 + Math.random() / 2);
    this.pause = Math.min(this.pause * 2, longestPause);
    this.retry = setTimeout(() => this.open(), wait);
    this.on.state("disconnected", { since: this.lost, next: Date.now() + wait });
  }

  visibility() {
    clearTimeout(this.hidden);
    if (document.hidden) {
      // A hidden page closes its connection.
      this.hidden = setTimeout(() => {
        this.close();
        this.paused = true;
        this.on.state("paused", {});
      }, hiddenPatience);
    } else if (this.paused) {
      this.paused = false;
      this.open();
    }
  }
}
