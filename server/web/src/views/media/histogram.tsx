/** Histograms over the steps, darker where there are more values, and the one of the chosen step. */

import type { Media } from "../../resources";
import { number } from "../../format";
import { useDrawn } from "./common";

interface Bins {
  edges: number[];
  counts: number[];
}

function bins({ metadata }: Media): Bins | null {
  const { edges, counts } = metadata as Partial<Bins>;
  return Array.isArray(edges) && Array.isArray(counts) && edges.length === counts.length + 1 && counts.length > 0 ? { edges, counts } : null;
}

export function Histogram({ media, shown }: { media: Media[]; shown: Media }) {
  const all = media.flatMap((one) => bins(one) ?? []);
  const low = Math.min(...all.map(({ edges }) => edges[0]!));
  const high = Math.max(...all.map(({ edges }) => edges[edges.length - 1]!));
  const first = media[0]!.step;
  const last = media[media.length - 1]!.step;
  const canvas = useDrawn(
    (context, width, height) => {
      const colour = getComputedStyle(context.canvas).color;
      const span = high - low || 1;
      context.clearRect(0, 0, width, height);
      media.forEach((one, at) => {
        const found = bins(one);
        if (found === null) return;
        const x = across(at, media, width);
        const most = Math.max(...found.counts.map((count, bin) => count / (found.edges[bin + 1]! - found.edges[bin]! || 1)));
        context.fillStyle = colour;
        found.counts.forEach((count, bin) => {
          const [from, to] = [found.edges[bin]!, found.edges[bin + 1]!];
          context.globalAlpha = count === 0 ? 0 : 0.08 + (0.92 * count) / (to - from || 1) / most;
          const top = ((high - to) / span) * height;
          context.fillRect(x[0], top, Math.max(1, x[1] - x[0]), Math.max(1, ((to - from) / span) * height));
        });
      });
      context.globalAlpha = 1;
      const x = across(media.indexOf(shown), media, width);
      context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad");
      context.strokeRect(x[0], 0, Math.max(1, x[1] - x[0]), height);
    },
    [media, shown],
  );
  const found = bins(shown);
  if (found === null) return <p class="muted">No finite values.</p>;
  const most = Math.max(...found.counts);
  const { mean, std, not_finite } = shown.metadata as Record<string, number | undefined>;
  return (
    <div class="histogram">
      {media.length > 1 && (
        <div>
          <canvas ref={canvas} role="img" aria-label={`${media.length} histograms from batch ${first} to ${last}`} />
          <small class="muted ends">
            <span>batch {number(first)}</span> <span>{number(low)} to {number(high)}</span> <span>{number(last)}</span>
          </small>
        </div>
      )}
      <div>
        <svg viewBox={`0 0 ${found.counts.length} 100`} preserveAspectRatio="none" role="img" aria-label={`histogram at batch ${shown.step}`}>
          {found.counts.map((count, bin) => (
            <rect key={bin} x={bin} y={100 - (100 * count) / (most || 1)} width={0.95} height={(100 * count) / (most || 1)}>
              <title>{`${number(found.edges[bin])} to ${number(found.edges[bin + 1])}: ${number(count)}`}</title>
            </rect>
          ))}
        </svg>
        <small class="muted ends">
          <span>{number(found.edges[0])}</span>
          <span>
            mean {number(mean)}, standard deviation {number(std)}
            {not_finite ? `, ${number(not_finite)} not finite` : ""}
          </span>
          <span>{number(found.edges[found.edges.length - 1])}</span>
        </small>
      </div>
    </div>
  );
}

/** From where to where the histogram at an index reaches: to the step of the next one. */
function across(at: number, media: Media[], width: number): [number, number] {
  const first = media[0]!.step;
  const steps = media[media.length - 1]!.step - first;
  const mean = steps / Math.max(1, media.length - 1);
  const place = (step: number) => ((step - first) / (steps + mean || 1)) * width;
  const next = media[at + 1]?.step ?? media[at]!.step + mean;
  return [place(media[at]!.step), place(next)];
}
