"use strict";
(async () => {
  const PAPER = 695;  // pixels of A4 without its margins: 210 mm less 24 mm
  const $ = (id) => document.getElementById(id);

  // Passes fold; the arrow keys open one after another.
  const passes = [...document.querySelectorAll(".pass")], find = $("find");
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !passes.length || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.target === find) return;
    const next = passes.findIndex((pass) => pass.open) + step;
    const at = Math.min(Math.max(next, 0), passes.length - 1);
    passes.forEach((pass, i) => { pass.open = i === at; });
    event.preventDefault();
  });

  // A search leaves those that have it, marks where, and goes from one to the next.
  let hits = [], hit = 0;
  const within = (pass, wanted) => {
    const ranges = [], walker = document.createTreeWalker(pass, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());)
      for (const { index, 0: text } of node.data.matchAll(wanted)) {
        const range = new Range();
        range.setStart(node, index);
        range.setEnd(node, index + text.length);
        ranges.push(range);
      }
    return ranges;
  };
  const marked = (name, ranges) => {
    if (globalThis.Highlight) CSS.highlights.set(name, ranges.reduce((all, range) => all.add(range), new Highlight()));
  };
  const go = (step) => {
    if (!hits.length) return;
    hit = (hit + step + hits.length) % hits.length;
    const pass = hits[hit].startContainer.parentElement.closest(".pass"), pre = pass.querySelector("pre");
    pass.open = true;
    const [at, box] = [hits[hit], pre].map((part) => part.getBoundingClientRect());
    if (pre.contains(hits[hit].startContainer)) {
      const isBeside = at.left < box.left || at.right > box.left + pre.clientWidth;
      pre.scrollTop += at.top - box.top - pre.clientHeight / 2;
      pre.scrollLeft += isBeside ? at.left - box.left - pre.clientWidth / 2 : 0;
    }
    marked("hit", [hits[hit]]);
    if (step) pass.scrollIntoView({ block: "nearest" });
    $("hits").textContent = `${hit + 1} of ${hits.length}`;
  };
  find?.addEventListener("input", () => {
    const text = find.value.trim(), wanted = RegExp(text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"), "gi");
    hits = [];
    for (const pass of passes) {
      const ranges = text ? within(pass, wanted) : [];
      pass.hidden = text && !ranges.length;
      pass.open = ranges.length;
      hits = hits.concat(ranges);
    }
    hit = 0;
    marked("hits", hits);
    marked("hit", []);
    $("hits").textContent = text && "not found";
    go(0);
  });
  find?.addEventListener("keydown", (event) => { if (event.key === "Enter") go(event.shiftKey ? -1 : 1); });

  // Tables that are closed are open on paper.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open], .pass)")];
    closed.forEach((table) => { table.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((table) => { table.open = false; }));

  // Spans are polygons, one trace a kind. Polygons with an outline have gaps between them; many are
  // one polygon, along the rows: plotly takes long for gaps.
  const corners = ({ customdata, meta, mode }) => {
    const outlined = mode !== "none", x = [], y = [];
    let before;
    for (const [start, end, row] of customdata) {
      const low = row + meta.low, high = row + meta.high;
      if (!outlined && low !== before) { x.push(0, 0); y.push(before ?? low, low); before = low; }
      x.push(start, start, end, end);
      y.push(low, high, high, low);
      if (outlined) { x.push(start, null); y.push(low, null); }
    }
    if (!outlined) { x.push(0); y.push(before); }
    return { x, y };
  };

  // What a rank does under the pointer: the spans of a row, by their starts.
  const pointing = (timeline) => {
    const tip = $("tip"), rows = new Map(), drawn = timeline.data.filter((trace) => trace.customdata);
    for (const { name, meta, customdata } of drawn) for (const [start, end, row, rank, action] of customdata) {
      const key = `${meta.side} ${row}`;
      if (!rows.has(key)) rows.set(key, []);
      rows.get(key).push({ start, end, name, text: `rank ${rank}, ${meta.side}: ${name} (${action})` });
    }
    for (const row of rows.values()) row.sort((a, b) => a.start - b.start);
    const under = (row, ms) => {
      let low = 0, high = row.length;
      while (low < high) { const mid = (low + high) >> 1; row[mid].start <= ms ? low = mid + 1 : high = mid; }
      const near = row.slice(Math.max(0, low - 12), low).reverse().filter((span) => span.end >= ms);
      return near.find((span) => span.name !== "reduce") ?? near[0];  // reductions last longer than others
    };
    const sides = [...new Set(drawn.map((trace) => trace.meta.side))];
    timeline.addEventListener("mousemove", (event) => {
      const { xaxis, yaxis } = timeline._fullLayout, box = timeline.getBoundingClientRect();
      const ms = xaxis.p2d(event.clientX - box.left - xaxis._offset);
      const y = yaxis.p2d(event.clientY - box.top - yaxis._offset), row = Math.round(y);
      const side = sides.length > 1 && y > row ? sides[1] : sides[0];
      const inside = Math.abs(y - row) < 0.46 && rows.get(`${side} ${row}`);
      const hit = inside && ms >= 0 ? under(inside, ms) : null;
      tip.hidden = !hit;
      if (!hit) return;
      const [start, end, took] = [hit.start, hit.end, hit.end - hit.start];
      tip.textContent = `${hit.text}\n${start.toPrecision(5)} to ${end.toPrecision(5)} ms, ${took.toPrecision(3)} ms`;
      tip.style.left = `${Math.min(event.pageX + 14, document.body.clientWidth - tip.offsetWidth)}px`;
      tip.style.top = `${event.pageY + 16}px`;
    });
    timeline.addEventListener("mouseleave", () => { tip.hidden = true; });
  };

  // Microbatches are numbered where the shortest span has room for two digits.
  const numbering = (timeline) => {
    const least = Math.min(...timeline.data.filter((trace) => trace.mode === "text").map((trace) => trace.meta));
    const look = () => {
      const { xaxis } = timeline._fullLayout;
      timeline.classList.toggle("narrow", xaxis.d2p(least) - xaxis.d2p(0) < 12);
    };
    timeline.on("plotly_afterplot", look);
    look();
  };

  const config = { responsive: true, displaylogo: false, displayModeBar: "hover" };
  const draw = async ([name, { data, layout }]) => {
    const spans = data.filter((trace) => trace.fill === "toself" && !trace.x);
    for (const trace of spans) Object.assign(trace, corners(trace));
    const plot = await Plotly.newPlot(name, data, layout, config);
    if (spans.length) { pointing(plot); numbering(plot); }
    performance.mark(name);
  };
  // One after another; between two the browser paints and answers.
  const waiting = Object.entries(JSON.parse($("figures").textContent));
  // On paper all are drawn, as wide as it is.
  const plots = () => document.querySelectorAll(".js-plotly-plot");
  const sized = (layout) => plots().forEach((plot) => Plotly.relayout(plot, layout));
  addEventListener("beforeprint", () => { waiting.splice(0).forEach(draw); sized({ width: PAPER }); });
  addEventListener("afterprint", () => sized({ width: null, autosize: true }));
  while (waiting.length) {
    await draw(waiting.shift());
    await new Promise((done) => setTimeout(done));
  }

  // Timeline and memory have one clock: they zoom together.
  const clocks = ["timeline", "memory"].map($).filter(Boolean);
  let following = false;
  for (const plot of clocks) plot.on("plotly_relayout", async (change) => {
    if (following || !Object.keys(change).some((key) => key.startsWith("xaxis."))) return;
    following = true;
    const range = [...plot._fullLayout.xaxis.range];
    for (const other of clocks)
      if (other !== plot) await Plotly.relayout(other, { "xaxis.range": range });
    following = false;
  });

  document.documentElement.dataset.ready = "yes";
})();
