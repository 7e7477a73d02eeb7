// Package schedulerconfig checks a KubeSchedulerConfiguration for settings with which gpushare doesn't work, or doesn't work
// well. Of the files that the configuration names, it reads the certificates alone. It makes no network calls.
package schedulerconfig

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"
)

const kind = "KubeSchedulerConfiguration"

// Decode parses a KubeSchedulerConfiguration of kubescheduler.config.k8s.io/v1 in YAML or JSON. As in kube-scheduler, unknown
// and duplicate fields are errors, also in the arguments of kube-scheduler's own plugins.
func Decode(data []byte) (*schedulerv1.KubeSchedulerConfiguration, error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, errors.New("it is empty")
	}
	var meta metav1.TypeMeta
	if err := yaml.Unmarshal(data, &meta); err != nil {
		return nil, err
	}
	switch {
	case meta.Kind == "" || meta.APIVersion == "":
		return nil, fmt.Errorf("it has no kind or apiVersion, want a %s of %s", kind, schedulerv1.SchemeGroupVersion)
	case meta.Kind != kind || meta.APIVersion != schedulerv1.SchemeGroupVersion.String():
		return nil, fmt.Errorf("it is a %s of %s, want a %s of %s", meta.Kind, meta.APIVersion, kind, schedulerv1.SchemeGroupVersion)
	}
	if hasSeveral(data) {
		return nil, errors.New("it has several documents: kube-scheduler reads the first one only")
	}
	scheme := runtime.NewScheme()
	if err := schedulerv1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	config := &schedulerv1.KubeSchedulerConfiguration{}
	if _, _, err := decoder.Decode(data, nil, config); err != nil {
		return nil, err
	}
	if err := config.DecodeNestedObjects(decoder); err != nil {
		return nil, err
	}
	return config, nil
}

// hasSeveral reports whether a document with any content follows the first one.
func hasSeveral(data []byte) bool {
	documents := 0
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		document, err := reader.Read()
		if err != nil { // At the end: nothing else can go wrong in memory.
			return documents > 1
		}
		var content any // Not of a part that is no YAML: before the first document there may be directives.
		if yaml.Unmarshal(document, &content) == nil && content != nil {
			documents++
		}
	}
}
