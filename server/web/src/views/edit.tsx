/** What may be changed about an experiment: its name, description, labels and notes. */

import { useState } from "preact/hooks";

import { patch } from "../api";
import { Question } from "../dialog";
import type { Experiment } from "../resources";

export function Edit({ row, done }: { row: Experiment; done: () => void }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        edit
      </button>
      {open && <Form row={row} done={done} close={() => setOpen(false)} />}
    </>
  );
}

/** The labels of a text, each once. */
const split = (text: string): string[] => [...new Set(text.split(",").map((label) => label.trim()).filter(Boolean))];

function Form({ row, done, close }: { row: Experiment; done: () => void; close: () => void }) {
  const [name, setName] = useState(row.name);
  const [description, setDescription] = useState(row.description);
  const [labels, setLabels] = useState(row.labels.join(", "));
  const [notes, setNotes] = useState(row.notes);
  // What was not touched is not sent: somebody else may have changed it meanwhile.
  const changes = {
    ...(name !== row.name && { name }),
    ...(description !== row.description && { description }),
    ...(labels !== row.labels.join(", ") && { labels: split(labels) }),
    ...(notes !== row.notes && { notes }),
  };
  return (
    <Question title={`edit experiment ${row.id}`} deed="save" act={() => patch(`/experiments/${row.id}`, changes).then(done)} close={close}>
      <label class="field">
        Name
        <input required value={name} onInput={(e) => setName(e.currentTarget.value)} />
      </label>
      <label class="field">
        Description
        <input value={description} onInput={(e) => setDescription(e.currentTarget.value)} />
      </label>
      <label class="field">
        Labels, with commas between them
        <input value={labels} onInput={(e) => setLabels(e.currentTarget.value)} />
      </label>
      <label class="field">
        Notes
        <textarea rows={8} value={notes} onInput={(e) => setNotes(e.currentTarget.value)} />
      </label>
      <p class="muted">The submitted configuration does not change. Quotas of labels apply from now on.</p>
    </Question>
  );
}
