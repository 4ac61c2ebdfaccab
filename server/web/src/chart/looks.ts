/** How a trial looks in every chart: the same for ever, whichever others are drawn beside it. */

export interface Look {
  color: string;
  /** Lengths of strokes and gaps; empty for a whole line. */
  dash: number[];
}

const COLORS = [
  "#2f6fed", "#e8590c", "#2b8a3e", "#ae3ec9", "#e03131", "#1098ad",
  "#b08900", "#7048e8", "#d6336c", "#74b816", "#a0522d", "#778094",
];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

/** Looks with a whole line. */
export const PLAIN_LOOKS = COLORS.length;

/** The look of the trial that was the `place`-th of its experiment: 48 differ; `line` asks for a dash. */
export function look(place: number, line = Math.floor(place / COLORS.length)): Look {
  const dash = DASHES[line % DASHES.length]!;
  return { color: COLORS[place % COLORS.length]!, dash };
}

/** The place of each trial among those of its experiment, by its id; later trials change none. */
export function places(trials: { id: number }[]): Map<number, number> {
  const ids = trials.map((trial) => trial.id).sort((a, b) => a - b);
  return new Map(ids.map((id, place) => [id, place]));
}

/** Looks without a colour twice, while there are enough colours; the first of two keeps its colour. */
export function distinct(looks: Look[]): Look[] {
  if (looks.length > COLORS.length) return looks;
  const used = new Set(looks.map(({ color }) => color));
  const free = COLORS.filter((color) => !used.has(color));
  const seen = new Set<string>();
  return looks.map((one) => {
    const color = seen.has(one.color) ? free.shift()! : one.color;
    seen.add(color);
    return { ...one, color };
  });
}
