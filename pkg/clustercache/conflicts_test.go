package clustercache

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/fake"
)

func TestInterferes(t *testing.T) {
	antiAffinity := func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "x"}},
		}}
	}
	preferred := func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{
			PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "x"}}},
			PodAntiAffinity: &corev1.PodAntiAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 1}},
			},
		}
	}
	spread := func(action corev1.UnsatisfiableConstraintAction) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: action}}
		}
	}
	volume := func(source corev1.VolumeSource) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{VolumeSource: source})
		}
	}
	claim := volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}})
	config := volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}})
	device := func(pod *corev1.Pod) { pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "r"}} }
	port := func(number int32, protocol corev1.Protocol, ip string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: number}, {HostPort: number, Protocol: protocol, HostIP: ip}}
		}
	}
	// ports returns n host ports, of which the last is 80.
	ports := func(n int, ip string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			for i := range n {
				pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports, corev1.ContainerPort{HostPort: int32(79 + n - i), HostIP: ip})
			}
		}
	}
	initPort := func(restart corev1.ContainerRestartPolicy) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.InitContainers = []corev1.Container{{RestartPolicy: &restart, Ports: []corev1.ContainerPort{{HostPort: 80}}}}
		}
	}
	type edits = []fake.PodEdit
	for name, test := range map[string]struct {
		pod, preemptor edits
		want           bool
	}{
		"plain pods":                         {},
		"the pod has required anti-affinity": {pod: edits{antiAffinity}, want: true},
		"the preemptor has it":               {preemptor: edits{antiAffinity}, want: true},
		"preferences":                        {pod: edits{preferred}, preemptor: edits{preferred}},
		"the preemptor must be spread":       {preemptor: edits{spread(corev1.DoNotSchedule)}, want: true},
		"the preemptor prefers to be spread": {preemptor: edits{spread(corev1.ScheduleAnyway)}},
		"only the pod must be spread":        {pod: edits{spread(corev1.DoNotSchedule)}},
		"volumes of both":                    {pod: edits{config, claim}, preemptor: edits{claim}, want: true},
		"a volume of the pod":                {pod: edits{claim}, preemptor: edits{config}},
		"a volume of the preemptor":          {pod: edits{config}, preemptor: edits{claim}},
		"resource claims of both":            {pod: edits{device}, preemptor: edits{device}, want: true},
		"a resource claim of the pod":        {pod: edits{device}},
		"the same port":                      {pod: edits{port(80, "", "")}, preemptor: edits{port(80, "TCP", "0.0.0.0")}, want: true},
		"another protocol":                   {pod: edits{port(80, "", "")}, preemptor: edits{port(80, "UDP", "")}},
		"another port":                       {pod: edits{port(80, "", "")}, preemptor: edits{port(81, "", "")}},
		"another address":                    {pod: edits{port(80, "", "10.0.0.1")}, preemptor: edits{port(80, "", "10.0.0.2")}},
		"the same address":                   {pod: edits{port(80, "", "10.0.0.1")}, preemptor: edits{port(80, "", "10.0.0.1")}, want: true},
		"any address":                        {pod: edits{port(80, "", "10.0.0.1")}, preemptor: edits{port(80, "", "")}, want: true},
		"a sidecar's port":                   {pod: edits{initPort(corev1.ContainerRestartPolicyAlways)}, preemptor: edits{port(80, "", "")}, want: true},
		"one of many ports":                  {pod: edits{ports(1000, "")}, preemptor: edits{port(80, "", "10.0.0.1")}, want: true},
		"none of many ports":                 {pod: edits{ports(1000, "")}, preemptor: edits{port(79, "", "")}},
		"many ports of one address each":     {pod: edits{ports(1000, "10.0.0.1")}, preemptor: edits{ports(1000, "10.0.0.2")}},
		"a port at several addresses": {
			pod: edits{port(80, "", "10.0.0.1"), ports(1, "10.0.0.3")}, preemptor: edits{ports(2, "10.0.0.2"), ports(2, "10.0.0.3")}, want: true,
		},
		"the port of another init container": {pod: edits{initPort(corev1.ContainerRestartPolicyNever)}, preemptor: edits{port(80, "", "")}},
		"a pod that is too large":            {pod: edits{tooLarge}, want: true},
		"a preemptor that is too large":      {preemptor: edits{tooLarge}, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			preemptor := NewPodInfo(fake.Pod("p", 16, test.preemptor...))
			for _, memory := range []int64{0, 5} { // Of pods that ask for no GPU memory, less is kept.
				if got := Interferes(NewPodInfo(fake.Pod("v", memory, test.pod...)), preemptor); got != test.want {
					t.Errorf("%v for a pod with %d, want %v", got, memory, test.want)
				}
			}
		})
	}
}

// tooLarge makes a pod too large by its labels.
func tooLarge(pod *corev1.Pod) {
	pod.Labels = map[string]string{}
	for i := range 1000 {
		pod.Labels[fmt.Sprint("l", i)] = ""
	}
}
