package inspect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// writeStructured writes a report, or groups, as an indented JSON document, or as a YAML document of the same structure. The
// separator of YAML documents comes first, so they can follow one another.
func writeStructured(out *bytes.Buffer, output string, value any) error {
	text, err := marshal(value)
	if err != nil {
		return err
	}
	if output == outputJSON {
		fmt.Fprintf(out, "%s\n", text)
		return nil
	}
	if text, err = yaml.JSONToYAML(text); err != nil {
		return fmt.Errorf("writing YAML: %w", err)
	}
	fmt.Fprintf(out, "---\n%s", text)
	return nil
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

// writeNames writes the names of the nodes that exist, or of the pending pods, as other commands take them: kubectl describe, say.
func writeNames(out *bytes.Buffer, report Report, pending bool) {
	for _, node := range report.Nodes {
		if !pending && !node.Gone {
			fmt.Fprintf(out, "node/%s\n", node.Name)
		}
	}
	for _, pod := range report.PendingPods {
		if pending {
			fmt.Fprintf(out, "pod/%s\n", pod.Name)
		}
	}
}
