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

  // Data and plotly are in the page, compressed.
  const unpacked = (id) => {
    const packed = atob($(id).textContent), bytes = new Uint8Array(packed.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream);
  };
  const started = async () => {
    const code = await unpacked("plotly").arrayBuffer();
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    await new Promise((done, failed) => {
      const script = document.createElement("script");
      Object.assign(script, { src: url, onload: done, onerror: failed });
      document.head.append(script);
    });
    URL.revokeObjectURL(url);
    performance.mark("plotly");
  };
  const starting = $("plotly").textContent && started();
  const page = await unpacked("page-data").json();  // while plotly is read beside it
  await starting;

  // Spans are polygons, one trace a kind: bars of their own would be too many elements. Polygons with
  // an outline have gaps between them; many are one polygon, along the rows: plotly takes long for gaps.
  const corners = ({ starts, ends, rows, middle, half }, outlined) => {
    const x = [], y = [];
    let before;
    starts.forEach((start, i) => {
      const low = rows[i] + middle - half, high = low + 2 * half, end = ends[i];
      if (!outlined && low !== before) { x.push(0, 0); y.push(before ?? low, low); before = low; }
      x.push(start, start, end, end);
      y.push(low, high, high, low);
      if (outlined) { x.push(start, null); y.push(low, null); }
    });
    if (!outlined) { x.push(0); y.push(before); }
    return { x, y };
  };
  const config = { responsive: true, displaylogo: false, displayModeBar: "hover" };
  const shared = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#888888", activecolor: "#0072b2" },
    hoverlabel: { bgcolor: "#1b1b1b", bordercolor: "#1b1b1b", align: "left",
      font: { color: "#ffffff", size: 12 } },
    font: { family: "inherit", size: 12 }, colorway: ["#0072b2", "#d55e00", "#009e73", "#cc79a7"],
  };

  // What a rank does under the pointer: rows are sorted by their starts.
  const pointing = ({ spans, ranks }) => {
    const timeline = $("timeline"), tip = $("tip"), rows = new Map();
    for (const kind of spans) kind.starts.forEach((start, i) => {
      const key = `${kind.side} ${kind.rows[i]}`;
      if (!rows.has(key)) rows.set(key, []);
      rows.get(key).push({ start, end: kind.ends[i], action: kind.actions[i], kind });
    });
    for (const row of rows.values()) row.sort((a, b) => a.start - b.start);
    const under = (row, ms) => {
      let low = 0, high = row.length;
      while (low < high) { const mid = (low + high) >> 1; row[mid].start <= ms ? low = mid + 1 : high = mid; }
      let best = null;
      for (let i = low - 1; i >= Math.max(0, low - 12); i--)  // reductions last longer than others
        if (row[i].end >= ms && (!best || row[i].kind.what !== "reduce")) { best = row[i]; break; }
      return best;
    };
    const sides = [...new Set(spans.map((kind) => kind.side))];
    timeline.addEventListener("mousemove", (event) => {
      const { xaxis, yaxis } = timeline._fullLayout, box = timeline.getBoundingClientRect();
      const ms = xaxis.p2d(event.clientX - box.left - xaxis._offset);
      const y = yaxis.p2d(event.clientY - box.top - yaxis._offset), row = Math.round(y);
      const side = sides.length > 1 && y > row ? sides[1] : sides[0];
      const inside = Math.abs(y - row) < 0.46 && rows.get(`${side} ${row}`);
      const hit = inside && ms >= 0 ? under(inside, ms) : null;
      tip.hidden = !hit;
      if (!hit) return;
      const took = hit.end - hit.start;
      tip.textContent = `rank ${ranks[row]}, ${side}: ${hit.kind.what} (${hit.action})\n` +
        `${hit.start.toPrecision(5)} to ${hit.end.toPrecision(5)} ms, ${took.toPrecision(3)} ms`;
      tip.style.left = `${Math.min(event.pageX + 14, document.body.clientWidth - tip.offsetWidth)}px`;
      tip.style.top = `${event.pageY + 16}px`;
    });
    timeline.addEventListener("mouseleave", () => { tip.hidden = true; });
  };

  // Microbatches are numbered where the shortest span has room for two digits.
  const numbering = ({ numbered }) => {
    const timeline = $("timeline");
    const look = () => {
      const { xaxis } = timeline._fullLayout;
      timeline.classList.toggle("narrow", xaxis.d2p(numbered) - xaxis.d2p(0) < 12);
    };
    timeline.on("plotly_afterplot", look);
    look();
  };

  const draw = async (figure) => {
    let at = 0;
    for (const trace of figure.data)
      if (trace.fill === "toself" && !trace.x)
        Object.assign(trace, corners(figure.more.spans[at++], trace.mode !== "none"));
    await Plotly.newPlot($(figure.name), figure.data, { ...shared, ...figure.layout }, config);
    if (figure.name === "timeline") { pointing(figure.more); numbering(figure.more); }
    performance.mark(figure.name);
  };
  // One after another; between two the browser paints and answers.
  const waiting = [...page.figures];
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
