/** A panel for each name of the media, and one slider that sets the step of all panels. */

import { useMemo } from "preact/hooks";

import { all, get } from "../../api";
import { bytes, number } from "../../format";
import { useLoaded } from "../../live";
import { Problem, Raw } from "../../parts";
import type { Media, MediaName, MediaNamePage } from "../../resources";
import { trialAddress, useChoice } from "../../route";
import type { MediaProps, Series } from "./common";
import { Contents } from "./contents";

/** Most panels that are shown; the filter selects others. */
const MOST_PANELS = 24;

interface Panel {
  name: string;
  type: MediaName["type"];
  trials: number[];
  /** Changes with the media, so that they are read again only then. */
  version: string;
}

async function names(trials: number[]): Promise<{ panels: Panel[]; steps: number[] }> {
  const pages = await Promise.all(trials.map((id) => get<MediaNamePage>(`/trials/${id}/media/names`)));
  const panels = new Map<string, Panel>();
  const steps = new Set<number>();
  pages.forEach((page, at) => {
    for (const { name, type, first_step, last_step, count, size } of page.names) {
      const key = `${type} ${name}`;
      const panel = panels.get(key) ?? { name, type, trials: [], version: "" };
      panel.trials.push(trials[at]!);
      panel.version += `${count} ${last_step} ${size},`;
      panels.set(key, panel);
      steps.add(first_step).add(last_step);
    }
  });
  return { panels: [...panels.values()].sort((a, b) => (a.name < b.name ? -1 : 1)), steps: [...steps] };
}

export function Panels({ trials, tick, quiet = false }: MediaProps) {
  const [filter, setFilter] = useChoice("media");
  const [chosen, setStep] = useChoice("step");
  const found = useLoaded(`media ${trials.join()}`, () => names(trials), tick);
  if (found.value === null) return found.error ? <Problem text={found.error} /> : <p class="muted">Loading…</p>;
  const { panels, steps } = found.value;
  if (panels.length === 0 && quiet) return null;
  if (panels.length === 0) {
    return (
      <p class="muted">
        No media yet. Report some with <code>context.report_image(...)</code>, <code>report_table</code>, <code>report_text</code>,{" "}
        <code>report_histogram</code>, <code>report_audio</code> or <code>report_file</code>.
      </p>
    );
  }
  const matching = panels.filter((panel) => panel.name.includes(filter));
  const first = Math.min(...steps);
  const last = Math.max(...steps);
  const step = chosen === "" ? last : Math.min(last, Math.max(first, Number(chosen) || 0));
  return (
    <section class="media">
      <div class="choice">
        {panels.length > 3 && <input type="search" aria-label="filter by name" placeholder="Filter by name" value={filter} onInput={(e) => setFilter(e.currentTarget.value)} />}
        {last > first && (
          <label class="steps">
            Batch
            <input
              type="range"
              aria-label="batch"
              min={first}
              max={last}
              value={step}
              onInput={(e) => setStep(Number(e.currentTarget.value) === last ? "" : e.currentTarget.value)}
            />
            <output>{number(step)}</output>
          </label>
        )}
        {matching.length > MOST_PANELS && <span class="muted">Showing {MOST_PANELS} of {matching.length} names</span>}
      </div>
      {matching.slice(0, MOST_PANELS).map((panel) => (
        <OnePanel key={`${panel.type} ${panel.name}`} panel={panel} step={step} several={trials.length > 1} />
      ))}
    </section>
  );
}

function OnePanel({ panel, step, several }: { panel: Panel; step: number; several: boolean }) {
  const query = `media?name=${encodeURIComponent(panel.name)}&type=${panel.type}`;
  const load = () => Promise.all(panel.trials.map(async (trial): Promise<Series> => ({ trial, media: await all<Media>(`/trials/${trial}/${query}`, "media") })));
  const found = useLoaded(`${panel.trials.join()} ${query}`, load, panel.version);
  const size = useMemo(() => (found.value ?? []).flatMap(({ media }) => media).reduce((sum, { size }) => sum + size, 0), [found.value]);
  return (
    <figure class="chart" aria-label={panel.name}>
      <figcaption>
        <span>{panel.name}</span> <small class="muted">{panel.type}{size > 0 && `, ${bytes(size)}`}</small>{" "}
        <Raw path={`/trials/${panel.trials[0]}/${query}`} />
      </figcaption>
      {found.error && <Problem text={found.error} />}
      {found.value === null && !found.error && <p class="muted">Loading…</p>}
      <div class={several ? "beside" : ""}>
        {found.value?.map((series) => (
          <div key={series.trial}>
            {several && <a href={trialAddress(series.trial, "media")}>trial {series.trial}</a>}
            <Contents type={panel.type} series={series} step={step} several={several} />
          </div>
        ))}
      </div>
    </figure>
  );
}
