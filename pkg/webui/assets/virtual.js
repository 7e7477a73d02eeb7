// Long lists of rows of equal height: only visible rows are in the document.

const spare = 6; // Rows above and below the visible ones.

export class VirtualRows {
  /**
   * scroller scrolls, body takes the rows between two spacers that make up for the others. height is that of a row.
   * render(item, index) makes a row. spacer() makes an empty row. drawn() is called after rows were drawn.
   */
  constructor({ scroller, body, height, render, spacer, drawn: after = () => {} }) {
    Object.assign(this, { scroller, body, height, render, after });
    this.above = spacer();
    this.below = spacer();
    body.append(this.above, this.below);
    this.items = [];
    this.drawn = new Map(); // The row's element by item.
    this.asked = false;
    scroller.addEventListener("scroll", () => this.soon(), { passive: true });
    new ResizeObserver(() => this.soon()).observe(scroller);
  }

  soon() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  /** show sets the items. Items that are the same objects as before keep their rows. */
  show(items) {
    this.items = items;
    this.draw();
  }

  /** draw updates the document for the visible rows. */
  draw() {
    const { items, height, scroller, drawn } = this;
    if (scroller.hidden || scroller.clientHeight === 0) return;
    const first = Math.max(0, Math.floor(scroller.scrollTop / height) - spare);
    const last = Math.min(items.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / height) + spare);
    this.above.style.height = Math.min(first, items.length) * height + "px";
    this.below.style.height = Math.max(0, items.length - last) * height + "px";
    const wanted = items.slice(first, last);
    const keep = new Set(wanted);
    for (const [item, row] of drawn) {
      if (!keep.has(item)) {
        row.remove();
        drawn.delete(item);
      }
    }
    let before = this.above;
    wanted.forEach((item, i) => {
      let row = drawn.get(item);
      if (!row) {
        row = this.render(item, first + i);
        drawn.set(item, row);
      }
      row.setAttribute("aria-rowindex", first + i + 1);
      if (before.nextSibling !== row) before.after(row);
      before = row;
    });
    this.after();
  }

  /** reveal scrolls until the item at the index is visible, and returns its row. */
  reveal(index) {
    const { scroller, height } = this;
    const head = scroller.querySelector("thead")?.offsetHeight ?? 0;
    const top = index * height;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top + height + head > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + height + head - scroller.clientHeight;
    this.draw();
    return this.drawn.get(this.items[index]);
  }
}
