"""A microphone in the notebook: a widget that records in the browser and gives the kernel a WAV file."""

from __future__ import annotations

import base64

from f5kit.errors import UserError

# The browser records in whatever form it likes, decodes that again and sends 16-bit mono samples as a WAV.
_ESM = """
function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const word = (at, text) => [...text].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  word(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  word(36, "data"); view.setUint32(40, 2 * samples.length, true);
  samples.forEach((x, i) => view.setInt16(44 + 2 * i, 32767 * Math.max(-1, Math.min(1, x)), true));
  return new Uint8Array(view.buffer);
}
function base64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(text);
}
function render({ model, el }) {
  const button = document.createElement("button"), told = document.createElement("span");
  button.type = "button";
  button.className = "jupyter-button widget-button lm-Widget p-Widget";
  button.textContent = "Record";
  button.setAttribute("aria-label", "Record a reference with the microphone");
  told.setAttribute("role", "status");
  told.style.marginLeft = "8px";
  let recorder = null, timer = null;
  const stop = () => { if (recorder && recorder.state !== "inactive") recorder.stop(); };
  async function take(pieces, type) {
    const context = new AudioContext();
    const sound = await context.decodeAudioData(await new Blob(pieces, { type }).arrayBuffer());
    const samples = new Float32Array(sound.length);
    for (let c = 0; c < sound.numberOfChannels; c++)
      sound.getChannelData(c).forEach((x, i) => { samples[i] += x / sound.numberOfChannels; });
    context.close();
    model.set("seconds", sound.duration);
    model.set("wav", base64(wav(samples, sound.sampleRate)));
    model.save_changes();
    told.textContent = `${sound.duration.toFixed(1)} s recorded`;
  }
  button.addEventListener("click", async () => {
    if (recorder && recorder.state === "recording") return stop();
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const pieces = [];
      recorder = new MediaRecorder(stream);
      recorder.ondataavailable = (event) => pieces.push(event.data);
      recorder.onstop = async () => {
        clearTimeout(timer);
        stream.getTracks().forEach((track) => track.stop());
        button.textContent = "Record";
        try { await take(pieces, recorder.mimeType); }
        catch (error) { told.textContent = `The recording can't be read: ${error.message}`; }
      };
      recorder.start();
      timer = setTimeout(stop, 1000 * model.get("longest"));
      button.textContent = "Stop";
      told.textContent = "recording";
    } catch (error) {
      told.textContent = `No microphone: ${error.message}. Allow it in the browser, or upload a recording.`;
    }
  });
  el.append(button, told);
  return stop;
}
export default { render };
"""


def make_recorder(longest: float):
    """A widget whose `wav` changes with every recording of at most `longest` seconds; `recorded` gives its bytes.

    Raises UserError where anywidget is not installed.
    """
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise UserError("recording in the notebook needs anywidget: pip install anywidget, or upload a file") from None

    class Recorder(anywidget.AnyWidget):
        _esm = _ESM
        wav = traitlets.Unicode().tag(sync=True)
        seconds = traitlets.Float().tag(sync=True)
        longest = traitlets.Float(15.0).tag(sync=True)

    return Recorder(longest=longest)


def recorded(wav: str) -> bytes:
    """The WAV file that a recorder's `wav` holds."""
    return base64.b64decode(wav)
