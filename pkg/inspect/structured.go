package inspect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// WriteJSON writes a report, or groups, as one indented JSON document.
func WriteJSON(out io.Writer, value any) error {
	data, err := marshal(value)
	if err != nil {
		return err
	}
	_, err = out.Write(append(data, '\n'))
	return err
}

// WriteYAML writes one YAML document of the same structure, its separator first: so documents can follow one another.
func WriteYAML(out io.Writer, value any) error {
	data, err := marshal(value)
	if err != nil {
		return err
	}
	if data, err = yaml.JSONToYAML(data); err != nil {
		return fmt.Errorf("writing YAML: %w", err)
	}
	_, err = out.Write(append([]byte("---\n"), data...))
	return err
}

// marshal returns the value as indented JSON, in which every character is escaped that a terminal would act on or that YAML
// doesn't allow: one pod's annotation must not keep the rest from being shown.
func marshal(value any) ([]byte, error) {
	data, err := json.MarshalIndent(value, "", "    ")
	if err != nil {
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	escaped := make([]byte, 0, len(data))
	for _, r := range string(data) {
		if r >= 0x7f && r < 0xa0 || unicode.Is(unicode.Bidi_Control, r) || r == 0xfffe || r == 0xffff {
			escaped = fmt.Appendf(escaped, `\u%04x`, r)
		} else {
			escaped = utf8.AppendRune(escaped, r)
		}
	}
	return escaped, nil
}

// WriteNames writes the names of the nodes, or of the pending pods, as other commands take them: kubectl describe, say.
func WriteNames(out io.Writer, report Report, pending bool) error {
	var text bytes.Buffer
	if pending {
		for _, pod := range report.PendingPods {
			fmt.Fprintf(&text, "pod/%s\n", pod.Name)
		}
	} else {
		for _, node := range report.Nodes {
			fmt.Fprintf(&text, "node/%s\n", node.Name)
		}
	}
	_, err := text.WriteTo(out)
	return err
}
