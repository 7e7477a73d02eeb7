// Asks for changes each second. After a failure it asks again with increasing pauses. It reports the state of the connection.

const interval = 1000;
const firstPause = 500;
const longestPause = 30000;
// How long an answer may take.
const patience = 45000;
const hiddenPatience = 10000;

export class Updates {
  /** on has data(message) and connection(name, detail). If data throws, the next message has everything. */
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.pause = firstPause;
    document.addEventListener("visibilitychange", () => this.visibility());
    this.on.connection("connecting", {});
    this.ask();
  }

  async ask() {
    this.stop();
    const { signal } = (this.asking = new AbortController());
    try {
      const response = await fetch(this.url + "?since=" + (this.revision ?? ""), { signal: AbortSignal.any([signal, AbortSignal.timeout(patience)]) });
      if (!response.ok) throw new Error(response.statusText);
      if (response.status !== 204) { // Something has changed.
        const message = await response.json();
        this.revision = undefined;
        this.on.data(message);
        this.revision = message.revision;
      }
      this.pause = firstPause;
      this.lost = undefined;
      this.on.connection("live", {});
      this.next = setTimeout(() => this.ask(), interval);
    } catch {
      if (!signal.aborted) this.failed();
    }
  }

  stop() {
    this.asking?.abort();
    clearTimeout(this.next);
  }

  failed() {
    this.lost ??= Date.now();
    // Half of the pause is random, so that many pages don't ask again at the same time.
    const wait = this.pause * (0.5 + Math.random() / 2);
    this.pause = Math.min(this.pause * 2, longestPause);
    this.next = setTimeout(() => this.ask(), wait);
    this.on.connection("disconnected", { since: this.lost, next: Date.now() + wait });
  }

  visibility() {
    clearTimeout(this.hidden);
    if (document.hidden) {
      // A hidden page asks for nothing.
      this.hidden = setTimeout(() => {
        this.stop();
        this.paused = true;
        this.on.connection("paused", {});
      }, hiddenPatience);
    } else if (this.paused) {
      this.paused = false;
      this.ask();
    }
  }
}
